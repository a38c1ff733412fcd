"""The arithmetic of the live gate; `python -m bench.gate` runs it over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gate.__main__ import Judged, capacity, judge, main, record, table
from bench.gate.agreement import JCT, compare, spread
from bench.gate.around import Around, host_of, measure, spec_of
from bench.gate.live import Subject, napping
from bench.gate.recording import Idle, Load, Phase, Recording, read_recording
from bench.gate.simulated import simulate, spec_of_record
from bench.sections import read_section
from hackkv.timing import Stage
from hackkv.types import Role
from measure.serve.shapes import fixed
from sim.costs import Grid, Profile, read_profile
from sim.sizes import sizes_of
from sim.spec import Codec

# Recorded: SmolLM2, rot-k4v4, the first requests of two repeats; seconds.
LIVE: tuple[dict[str, tuple[float, ...]], ...] = (
    {JCT: (1.52, 1.94, 1.60, 2.05), "prefill": (0.13, 0.29, 0.14, 0.33), "decode": (1.35, 1.61, 1.42, 1.68)},
    {JCT: (1.50, 1.90, 1.61, 2.01), "prefill": (0.12, 0.28, 0.15, 0.32), "decode": (1.34, 1.58, 1.42, 1.65)},
    {JCT: (9.50, 9.90, 9.61, 9.01), "prefill": (5.12, 5.28, 5.15, 5.32), "decode": (4.34, 4.58, 4.42, 3.65)},
)
"""Three repeats, of which the median counts. Another program disturbed the last one."""


def simulated(prefill: float = 1.0, decode: float = 1.0) -> dict[str, list[float]]:
    parts = {
        "prefill": [prefill * seconds for seconds in LIVE[0]["prefill"]],
        "decode": [decode * seconds for seconds in LIVE[0]["decode"]],
    }
    return {JCT: [sum(pair) for pair in zip(*parts.values(), strict=True)], **parts}


@pytest.mark.parametrize(
    ("factors", "off"),
    [
        ({}, set()),
        ({"prefill": 1.1, "decode": 0.9}, set()),
        # 30% of 0.22 s is 4% of the JCT: more than the noise of the machine.
        ({"prefill": 1.3}, {("mean", "prefill"), ("p90", "prefill")}),
        ({"decode": 1.2}, {("mean", "decode")}),
        ({"decode": 1.4}, {("mean", "decode"), ("mean", JCT), ("p90", "decode"), ("p90", JCT)}),
        ({"decode": 0.8}, {("mean", "decode"), ("mean", JCT)}),
    ],
)
def test_a_stage_that_is_off_is_named(factors: dict[str, float], off: set[tuple[str, str]]) -> None:
    compared = compare(LIVE, simulated(**factors))
    assert {(each.statistic, each.stage) for each in compared if not each.agrees} == off


def test_a_difference_of_milliseconds_says_nothing() -> None:
    live = [{JCT: [1.0, 1.0], "transfer": [0.004, 0.004]}]
    assert all(each.agrees for each in compare(live, {JCT: [1.0, 1.0], "transfer": [0.0, 0.0]}))
    assert not all(each.agrees for each in compare(live, {JCT: [1.0, 1.0], "transfer": [0.1, 0.1]}))


def test_the_page_names_load_stages_and_what_is_off() -> None:
    repeats = tuple(Phase(sizes=((0.0, 9, 9),) * 4, stages=stages, wall_s=2, cpu_s={}) for stages in LIVE)
    judged = Judged(Load(share=0.25, rate=0.7, repeats=repeats), simulated(decode=1.2))
    lines = table([judged])
    assert lines[2].startswith("| 25%: 4 at 0.70/s, repeats within 4")
    assert "| decode | 1515 | 1818 | +20% **off** | 1659 | 1991 | +20% |" in lines[4]
    assert lines[-1].startswith("5 of 6 statistics agree; mean of decode +20%")
    assert spread(LIVE[:2]) == pytest.approx(0.013, abs=0.001)
    assert len(record([judged], "here")["loads"][0]["compared"]) == 6


def test_a_live_row_is_the_profiles_times_a_factor() -> None:
    grid = Grid(rows=(1, 4), columns=(0, 100), seconds=((1.0, 2.0), (3.0, 4.0)))
    alone = Profile(prefill=grid, decode=grid)
    more = (
        Around.nothing(alone).model_copy(update={"passes": (0.5, 2.0), "step": 2.0, "sequence_s": 0.1}).profile(alone)
    )
    assert more.prefill.seconds == ((0.5, 1.0), (6.0, 8.0))
    assert more.decode.seconds[0] == (2.0, 4.0)
    assert more.decode.seconds[1] == pytest.approx((6.3, 8.3))


def test_capacity_is_that_of_the_slower_role() -> None:
    passes = Grid(rows=(64, 512), columns=(0, 100), seconds=((0.1, 0.1), (0.8, 0.8)))
    steps = Grid(rows=(1, 8), columns=(0, 1000), seconds=((0.01, 0.01), (0.02, 0.02)))
    profile = Profile(prefill=passes, decode=steps)
    assert capacity(profile, fixed(64, 10)) == pytest.approx(10)
    assert capacity(profile, fixed(64, 100)) == pytest.approx(8 / (0.02 * 100))


def one_at_a_time(prompt: int, tokens: int, requests: int = 3, batch: int = 1) -> Phase:
    """Requests with known costs. Router and client take 20 ms per request, 10 us per prompt token, 4 ms per step and
    3 ms per token. Nodes take 30 ms per request and 2 us per byte, in addition to passes and steps."""
    sizes = ((0.0, prompt, tokens),) * requests
    kv_bytes = SIZES.footprint.wire_bytes(prompt)
    stages = dict.fromkeys(map(str, Stage), (0.0,) * requests)
    stages |= {
        "router_queue": (0.004 + 1e-5 * prompt,) * requests,
        "prefill": (0.5,) * requests,
        "decode": (0.1 * tokens,) * requests,
    }
    stages[JCT] = tuple(map(sum, zip(*stages.values(), strict=True)))
    between = requests * (0.02 + 1e-5 * prompt + (tokens - 1) * (0.004 / batch + 0.003))
    nodes = requests * (0.5 + 0.1 * tokens + 0.03 + 2e-6 * kv_bytes)
    shares = {"client": between / 4, "router": 3 * between / 4, "prefill-0": nodes / 2, "decode-0": nodes / 2}
    return Phase(sizes=sizes, stages=stages, wall_s=9.0, cpu_s=shares)


SIZES = sizes_of(Codec(name="rot-k4v4"), Subject("", "rot-k4v4").shape.kv_shape)
IDLE = Idle(
    passes=tuple(one_at_a_time(prompt, 2) for prompt in (16, 64, 512)),
    steps=(one_at_a_time(64, 32), one_at_a_time(64, 32, 12, 4)),
)


def test_what_processes_compute_beyond_passes_and_steps_is_shared_out() -> None:
    host = host_of(IDLE, (1, 4), 2, SIZES.footprint)
    assert host.cores == 2
    assert host.token_s == pytest.approx(0.003)
    assert host.step_s == pytest.approx(0.004)
    assert host.byte_s == pytest.approx(2e-6)


def recording(tmp_path: Path) -> Path:
    """A record of one load, in a file."""
    steps = Grid(rows=(1, 4), columns=(64, 512), seconds=((0.1, 0.1), (0.2, 0.2)))
    passes = Grid(rows=(16, 64, 512), columns=(0, 512), seconds=((0.5, 0.5),) * 3)
    load = Load(share=0.25, rate=0.1, repeats=(one_at_a_time(64, 8), one_at_a_time(64, 8)))
    made = Recording(
        command="python -m bench.gate",
        where="here",
        model="",
        codec="rot-k4v4",
        naps=False,
        cores=2,
        shape=Subject("", "rot-k4v4").shape,
        pages=dict.fromkeys((Role.PREFILL, Role.DECODE), 200),
        alone=Profile(prefill=passes, decode=steps),
        idle=IDLE,
        loads=(load,),
    )
    file = tmp_path / "recording.json"
    file.write_text(made.model_dump_json())
    assert read_recording(file) == made
    return file


@pytest.mark.parametrize("cores", [2.0, 1.6])
def test_what_a_pass_takes_from_a_step_beside_it_is_found(tmp_path: Path, cores: float) -> None:
    """The number of cores is found from the steps of an answer beside which prompts are computed."""
    known = read_recording(recording(tmp_path))
    spec = spec_of_record(known, tmp_path / "known.json")
    assert spec.host is not None
    there = spec.model_copy(update={"host": spec.host.model_copy(update={"cores": cores})})
    sizes = ((0.0, 64, 128), *((1.1, 512, 1),) * 20)
    stages = {name: tuple(seconds) for name, seconds in simulate(there, sizes).items()}
    beside = Phase(sizes=sizes * 2, stages={name: seconds * 2 for name, seconds in stages.items()}, wall_s=9, cpu_s={})
    heard = known.model_copy(update={"idle": known.idle.model_copy(update={"beside": beside})})
    found = spec_of_record(heard, tmp_path / "found.json").host
    assert found is not None
    assert found.cores == pytest.approx(cores, abs=0.01)


def test_a_record_is_judged_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path)
    around = Around.of(read_recording(file).alone, IDLE)
    assert (around.request_s, around.request_token_s) == pytest.approx((0.004, 1e-5))
    assert around.passes == pytest.approx((1, 1, 1))
    assert main(["--recorded", str(file), "--out", str(tmp_path)]) in (0, 1)
    assert "statistics agree" in capsys.readouterr().out
    page = (tmp_path / "plan.md").read_text()
    assert f"`python -m bench.gate --recorded {file} --out {tmp_path}`" in page
    assert len(read_section(tmp_path, "gate-hackkv-small-rot-k4v4", "plan")["loads"][0]["compared"]) == 18


@pytest.mark.parametrize("sequence_s", [0.0, 0.01, 0.02])
def test_each_sequence_more_takes_what_makes_a_batch_as_long_as_it_was(tmp_path: Path, sequence_s: float) -> None:
    """The batches are simulated, with a known cost of a sequence in a step."""
    of, profile = read_recording(recording(tmp_path)), tmp_path / "profile.json"
    spec = spec_of_record(of, profile)
    known = Around.of(of.alone, of.idle).model_copy(update={"sequence_s": sequence_s}).profile(of.alone)
    profile.write_text(known.model_dump_json())
    phases = [(phase, simulate(spec, phase.sizes[:batch])) for phase, batch in zip(of.idle.steps, (1, 4), strict=True)]
    steps = tuple(phase.model_copy(update={"stages": stages}) for phase, stages in phases)
    spec_of_record(of.model_copy(update={"idle": of.idle.model_copy(update={"steps": steps})}), profile)
    found = read_profile(profile).decode.seconds
    assert found[1] == pytest.approx(known.decode.seconds[1], abs=0.002)


RECORDED = sorted((Path(__file__).parents[2] / "docs" / "gate").glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_page_says_what_the_simulator_makes_of_its_records(file: Path) -> None:
    """If this fails after a change of the simulator, renew `docs/plan.md` by the command that the page names."""
    of = read_recording(file)
    said = read_section(file.parents[1], f"gate-{of.model or 'hackkv-small'}-{of.codec}", "plan")
    for judged, load in zip(judge(of), said["loads"], strict=True):
        for now, then in zip(judged.compared, load["compared"], strict=True):
            assert (now.stage, now.statistic) == (then["stage"], then["statistic"])
            assert (now.live, now.simulated) == pytest.approx((then["live"], then["simulated"]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_page_says_which_records_agree_in_everything(file: Path) -> None:
    assert main(["--recorded", str(file)]) == (1 if file.stem == "hackkv-small-fp16" else 0)


def test_tables_are_of_the_machine_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--recorded", str(RECORDED[0]), "--cores", "1.7", "--out", str(tmp_path)])
    assert "--cores asks what if" in capsys.readouterr().err


def test_there_are_records() -> None:
    assert RECORDED


UNTIL_TOKEN_0 = ("router_queue", "prefill_queue", "prefill")
"""Stages that end with a window of the router's clock."""


@pytest.mark.slow  # starts a cluster of processes
@pytest.mark.alone  # an event that the router reads late moves time from decode to `stream`
async def test_real_processes_take_no_less_than_the_simulator_says(tmp_path: Path) -> None:
    """Naps never end early. So single requests spend at least the simulated time in both roles and after token 0. All
    their stages are present.

    A router that reads token 0 late opens its next window late, when decode has begun. `StageClock` then counts the
    begin of decode as `stream`. The test allows a millisecond of decode for this.
    """
    steps = Grid(rows=(1, 4), columns=(64, 512), seconds=((0.004, 0.006), (0.005, 0.007)))
    passes = Grid(rows=(64, 512), columns=(0, 512), seconds=((0.02, 0.03), (0.1, 0.15)))
    alone = Profile(prefill=passes, decode=steps)
    file = tmp_path / "profile.json"
    file.write_text(alone.model_dump_json())
    subject, pages = Subject("", "rot-k4v4"), dict.fromkeys((Role.PREFILL, Role.DECODE), 200)
    spec = spec_of(subject.shape, subject.codec, pages, file, Around.nothing(alone))
    async with napping(subject, spec, tmp_path) as cluster:
        live = [await cluster.timed([cluster.call(0.0, 50 + 200 * number, 6)]) for number in range(4)]
        idle = await measure(cluster, alone)
    for phase in live:
        real, simulated = (
            {name: each[0] for name, each in of.items()} for of in (phase.stages, simulate(spec, phase.sizes))
        )
        assert real["prefill"] >= simulated["prefill"]
        assert real["decode"] >= simulated["decode"] - 1e-3
        assert real[JCT] >= simulated[JCT]
        after, least = (of[JCT] - sum(of[stage] for stage in UNTIL_TOKEN_0) for of in (real, simulated))
        assert after >= least >= simulated["decode"] > 0
    around = Around.of(alone, idle)
    assert min(*around.passes, around.step) >= 1
    assert len(around.passes) == 2
