"""Cost models: closed forms, grids, records."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.errors import ConfigError
from sim.catalogue import shipped
from sim.costs import CostModel, Grid, LinearStep, Profile, Profiled, Recorded, Roofline, read_profile, whole_steps
from sim.sizes import sizes_of
from sim.spec import Codec, Efficiency

MODEL = shipped().models["llama-70b"]
GRID = Grid(rows=(1, 2, 4), columns=(0, 100), seconds=((1.0, 2.0), (2.0, 4.0), (4.0, 8.0)))


def roofline(gpu: str, codec: str, tp: int, pp: int, efficiency: Efficiency) -> Roofline:
    return Roofline(MODEL, shipped().gpus[gpu], efficiency, sizes_of(Codec(name=codec), MODEL.kv_shape), tp, pp)


def test_a_prompt_on_the_papers_hardware() -> None:
    """Section 2.4 of the model: 13.3 s for 16.2K tokens of Llama-70B on eight A10G."""
    cost = roofline("A10G", "fp16", 4, 2, Efficiency(pass_s=0, all_reduce_s=0))
    assert cost.prefill([(0, 16_200)]).seconds == pytest.approx(13.1, abs=0.2)
    halves = [cost.prefill([(0, 8_192)]), cost.prefill([(8_192, 16_200 - 8_192)])]
    assert sum(half.seconds for half in halves) == pytest.approx(cost.prefill([(0, 16_200)]).seconds)


def test_a_step_reads_weights_once_and_kv_as_it_rests() -> None:
    free = Efficiency(step_s=0, all_reduce_s=0, bus=1)
    fp16, fp8, hack = (roofline("A100", codec, 1, 1, free) for codec in ("fp16", "fp8", "hack"))
    memory = 2039e9 * 0.8
    one = fp16.decode(1)
    assert one.fixed_s == pytest.approx(2 * 70.55e9 / memory)
    assert one.row_s == pytest.approx(327680 / memory)
    assert fp8.decode(1).row_s == pytest.approx(one.row_s * sizes_of(Codec(name="fp8"), MODEL.kv_shape).resting_ratio)
    assert 0 < hack.decode(1).approximation_row_s < 0.1 * hack.decode(1).row_s
    assert hack.decode(1).row_s < 0.25 * one.row_s


def test_integer_products_halve_attention_where_the_device_has_them() -> None:
    free = Efficiency(pass_s=0, all_reduce_s=0)

    def attention(gpu: str, codec: str) -> float:
        cost = roofline(gpu, codec, 1, 1, free)
        return cost.prefill([(100_000, 64)]).seconds - cost.prefill([(0, 64)]).seconds

    assert attention("A10G", "hack") == pytest.approx(attention("A10G", "fp16") / 2)
    assert attention("V100", "hack") == pytest.approx(attention("V100", "fp16"))
    assert attention("A10G", "fp8") == pytest.approx(attention("A10G", "fp16"))


@given(st.integers(1, 64), st.floats(0.001, 1), st.floats(0, 1e-3), st.integers(0, 10_000), st.integers(1, 300))
def test_many_steps_are_the_sum_of_single_ones(batch: int, fixed: float, row: float, context: int, steps: int) -> None:
    cost = LinearStep(batch, fixed, row)
    single = sum(cost.seconds(context + batch * step, 1) for step in range(steps))
    assert cost.seconds(context, steps) == pytest.approx(single, rel=1e-12)
    whole_s = cost.seconds(context, steps)
    assert whole_steps(cost, context, steps, whole_s, whole_s) == steps
    middle = (steps + 1) // 2
    between = (cost.seconds(context, middle - 1) + cost.seconds(context, middle)) / 2
    assert whole_steps(cost, context, steps, whole_s, between) == middle


@pytest.mark.parametrize(
    ("row", "column", "seconds"),
    [(1, 0, 1.0), (1.5, 0, 1.5), (3, 50, 4.5), (4, 200, 12.0), (8, 100, 16.0), (0.5, 0, 1.0)],
)
def test_a_grid_is_linear_between_and_a_little_beyond(row: float, column: float, seconds: float) -> None:
    assert GRID.at(row, column, "step") == pytest.approx(seconds)


@pytest.mark.parametrize(("row", "column", "words"), [(8.1, 0, "row 8.1"), (1, 201, "column 201")])
def test_a_grid_is_not_continued_far(row: float, column: float, words: str) -> None:
    with pytest.raises(ConfigError, match=f"step: {words} is more than 2 times the last measured"):
        GRID.at(row, column, "step")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": (1, 1, 2)}, "rows do not rise"),
        ({"seconds": ((1.0, 2.0),)}, "seconds are not 3 rows of 2"),
        ({"seconds": ((1.0, 2.0), (2.0, 4.0), (4.0, -8.0))}, "negative"),
    ],
)
def test_what_is_no_grid_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Grid.model_validate({**GRID.model_dump(), **change})


def test_a_profile_is_read_from_a_file(tmp_path: Path) -> None:
    profile = Profile(prefill=GRID, decode=GRID, quantize_share=0.1, attend_share=0.5)
    (tmp_path / "p.json").write_text(profile.model_dump_json())
    cost: CostModel = Profiled(read_profile(tmp_path / "p.json"))
    assert cost.prefill([(0, 2), (50, 2)]).seconds == pytest.approx(GRID.at(4, 25, ""))
    step = cost.decode(2)
    assert step.seconds(100, 2) == pytest.approx(GRID.at(2, 50, "") + GRID.at(2, 51, ""))
    assert step.attend_s(100, 2) == pytest.approx((0.5 * step.seconds(100, 2), 0))


def test_a_record_ends() -> None:
    cost = Recorded([1.0, 2.0], [0.5])
    assert cost.prefill([(0, 1)]).seconds == 1.0
    assert cost.decode(3).seconds(0, 1) == 0.5
    with pytest.raises(ConfigError, match="no decode step is left"):
        cost.decode(1)
