"""The paper's numbers, formulas and fits in docs/paper.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hackkv.errors import ConfigError
from measure.accuracy.variants import VARIANTS
from sim.paper.engine import good_engine, simulated_jct
from sim.paper.fit import BOUNDS, errors, fits
from sim.paper.losses import SAME_MEASURE, TABLE6, TABLE7, accuracy
from sim.paper.model import Parameters, erlang_wait, parts_of, reductions, setup_of
from sim.paper.numbers import FITTED, HELD_OUT, METHODS, numbers
from sim.paper.report import share_alone
from sim.paper.tables import table
from sim.spec import Codec

PAPER = numbers()
R = Parameters(
    compute=0.6,
    attention=2.9,
    network=0.195,
    setup_s=0.15,
    memory_us=6.5,
    product_us=6.1,
    dequantize_ms=10,
    dequantize_us=3.3,
    kvquant=1.32,
    rho=0.83,
)
"""Parameters fitted by other code. A test below has the seconds that this code gave for the baseline on Cocktail."""


def test_every_case_has_a_placement() -> None:
    assert len(PAPER.cases) * 3 == 36
    assert set(FITTED).isdisjoint(HELD_OUT)
    for case in PAPER.cases.values():
        setup = setup_of(case)
        assert setup.replicas >= 1
        assert PAPER.fleet[case.prefill] * setup.instance.gpus >= setup.replicas * setup.tp * setup.pp


@pytest.mark.parametrize(("name", "replicas"), [("Cocktail", 5), ("V100", 4), ("T4", 4), ("L4", 5), ("A100", 4)])
def test_replicas_of_llama(name: str, replicas: int) -> None:
    assert setup_of(PAPER.cases[name]).replicas == replicas


def test_the_formulas_give_what_other_code_gave() -> None:
    parts = parts_of(setup_of(PAPER.cases["Cocktail"]), "baseline", R)
    found = parts.prefill, parts.wait, parts.transfer, parts.decode
    assert found == pytest.approx((13.2, 9.6, 11.1, 36.0), abs=0.1)
    assert reductions(setup_of(PAPER.cases["V100"]), R) == pytest.approx((70.9, 41.8, 46.3), abs=0.5)


def test_the_fits_are_as_good_as_the_page_says() -> None:
    found = fits()
    assert np.abs(errors(found.all_cases, PAPER.cases)).mean() <= 4
    assert np.abs(errors(found.held_out, HELD_OUT)).max() <= 8
    for one in (found.all_cases, found.held_out):
        for name, (low, high) in BOUNDS.items():
            assert low <= getattr(one, name) <= high


def test_orders_that_the_held_out_fit_predicts() -> None:
    gains = {name: reductions(setup_of(PAPER.cases[name]), fits().held_out)[0] for name in ("V100", "T4", "Cocktail")}
    assert gains["V100"] > gains["T4"] > gains["Cocktail"]


def test_scaling_is_within_a_tenth_of_figure_14() -> None:
    at, p = setup_of(PAPER.cases["Cocktail"]), fits().held_out
    for method in METHODS:
        grown = 1 + 7 * share_alone(at, method, p)
        low, high = (PAPER.fig14.baseline,) * 2 if method == "baseline" else PAPER.fig14.others
        assert 0.9 * (1 + low / 100) <= grown <= 1.1 * (1 + high / 100)


def test_figure_14_lies_between_the_two_loads_that_the_paper_names() -> None:
    """The rate of Fig. 1d and the shares of Fig. 1a exclude each other; so no fit is near to FP16's growth."""
    at = setup_of(PAPER.cases["Cocktail"])
    by_rate, by_share = (700 * share_alone(at, "baseline", p) for p in (fits().held_out, fits().all_cases))
    assert by_rate + 8 < PAPER.fig14.baseline < by_share - 8
    low, high = PAPER.transfer_range
    assert 7 * low - 8 < PAPER.fig14.baseline < 7 * low < 7 * high


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.9), (4, 0.7)])
def test_erlang(servers: int, load: float) -> None:
    states = np.cumprod([1.0, *(load * servers / min(count, servers) for count in range(1, 4000))])
    waiting = np.maximum(np.arange(4000) - servers, 0) @ (states / states.sum())
    assert erlang_wait(load, servers) == pytest.approx(waiting / (load * servers), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_agrees_with_the_formulas_where_nobody_waits(method: str) -> None:
    case = PAPER.cases["arXiv"]
    at, p = setup_of(case), fits().all_cases.model_copy(update={"rho": 0.01})
    assert simulated_jct(case, at, method, p, 4_000, 1) == pytest.approx(parts_of(at, method, p).jct, rel=0.03)


@pytest.mark.parametrize(
    ("name", "beside_fp16", "beside_fp8"),
    [
        ("Cocktail", (17, 22), (10, 13)),
        ("T4", (19, 26), (11, 14)),
        ("V100", (39, 44), (20, 24)),
        ("A100", (10, 22), (7, 13)),
        ("arXiv", (10, 16), (5, 8)),
        ("IMDb", (4, 4), (2, 2)),
        ("HumanEval", (1, 1), (0.5, 0.5)),
    ],
)
def test_what_a_good_engine_gains(name: str, beside_fp16: tuple[float, float], beside_fp8: tuple[float, float]) -> None:
    at, hack = setup_of(PAPER.cases[name]), Codec(name="hack")
    for other, told in (("fp16", beside_fp16), ("fp8", beside_fp8)):
        for batch, gain in zip((2, 16), told, strict=True):
            ratio = sum(good_engine(at, hack, batch)) / sum(good_engine(at, Codec(name=other), batch))
            assert 100 * (1 - ratio) == pytest.approx(gain, abs=2.5)


def test_the_page_is_the_one_that_the_command_writes() -> None:
    page = Path("docs/paper.md").read_text()
    assert f"{np.abs(errors(fits().all_cases, PAPER.cases)).mean():.1f} points" in page
    rows = "\n".join(
        table(
            ("parameter", "all cases", "held out"),
            [
                (name, f"{getattr(fits().all_cases, name):.3g}", f"{getattr(fits().held_out, name):.3g}")
                for name in Parameters.model_fields
            ],
        )
    )
    assert rows in page


ACCURACY = Path("docs/accuracy")


def test_tables_6_and_7_on_the_page_are_those_that_the_command_writes() -> None:
    assert "\n".join(accuracy(PAPER, ACCURACY)) in Path("docs/paper.md").read_text()


def test_every_method_of_table_6_has_a_row_of_ours() -> None:
    assert set(TABLE6) == set(PAPER.table6)
    assert {*TABLE6.values(), *TABLE7, *TABLE7.values()} <= {row.name for row in VARIANTS}
    assert set(SAME_MEASURE) < set(PAPER.table7)


def test_losses_are_the_numbers_of_the_accuracy_page() -> None:
    """docs/accuracy.md has changes, docs/paper.md losses."""
    page, lines = Path("docs/accuracy.md").read_text(), "\n".join(accuracy(PAPER, ACCURACY))
    assert "RQE off, the paper's way (`hack-paper-no-rqe` against `hack-paper`)" in page
    assert "restating -3.8 points [-7.6, -0.3]; code -0.5 points [-6.0, +4.7]" in page
    assert "| `hack-paper-no-rqe` against `hack-paper` | - | 0.5 [-4.7, 6.0] | 3.8 [0.3, 7.6] | - |" in lines
    assert "restating -59.6 points [-75.1, -43.0]; code -1.0 points [-6.6, +4.3]" in page
    assert "| HACK 64 | `hack-paper` | 1.28 | 59.6 [43.0, 75.1] | 1.32 | 1.0 [-4.3, 6.6] |" in lines


def test_accuracy_without_measurements_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file of the row fp16"):
        list(accuracy(PAPER, tmp_path))
