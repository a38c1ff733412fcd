"""MPCache's rules are the codec's, a run without encryption answers like hackkv, and parties end together.

Tests that need SPU run only if `make private` has made its environment. The others run on numpy, which computes the
same as the parties.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.private.__main__ import PROTOCOLS, ROOT, _with_recorded, app, measure
from bench.private.jobs import Job, read_job, write_job
from bench.private.model import exp
from bench.private.parties import PartyLost, addresses, run_parties
from bench.private.plain import Model
from bench.private.report import Answer, Cell, Cost, mean, section
from bench.private.rules import Rules, best, bounds, chosen, kept_rows, packed, picked
from bench.private.session import VARIANTS, InTheClear, Values, respond, runs
from bench.sections import write_section
from hackkv.codecs.retention import Retention
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.worker import load_worker
from hackkv.packaged import SHIPPED
from tests.codecs.test_page_selection import chosen_by_the_paper
from tests.pair import greedy

PYTHON = ROOT / ".venv-private" / "bin" / "python"
RULES = Rules()
WAIT_S = 240.0
SHORT = 128


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.shipped()


def some(seed: int, *shape: int) -> Values:
    return np.random.default_rng(seed).standard_normal(shape)


@given(size=st.integers(1, 40), share=st.floats(0, 1), levels=st.integers(1, 50), seed=st.integers(0, 1000))
def test_the_best_are_found_and_the_earlier_of_equal_ones(size: int, share: float, levels: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(levels, size=(2, size)).astype(float)
    number = round(share * size)
    ranked = [sorted(range(size), key=lambda i, row=row: (-row[i], i))[:number] for row in scores]  # type: ignore[misc]
    flags, moved = best(np, scores, number), picked(np, scores, number)
    assert [np.flatnonzero(row).tolist() for row in flags] == [sorted(row) for row in ranked]
    assert [[np.flatnonzero(slot).tolist() for slot in row] for row in moved] == [[[i] for i in row] for row in ranked]
    there = packed(np, flags, number) @ np.arange(size)
    assert there.tolist() == [sorted(row) for row in ranked]


@settings(max_examples=25)
@given(tokens=st.integers(1, 300), budget=st.integers(1, 100), last=st.integers(0, 70), seed=st.integers(0, 1000))
def test_rows_that_stay_are_those_of_the_codec(tokens: int, budget: int, last: int, seed: int) -> None:
    rules = Rules(budget=budget, last=last)
    retention = Retention.model_validate(_retention(rules))
    votes = np.random.default_rng(seed).integers(1000, size=(2, tokens))
    kept = kept_rows(np, rules, votes)
    assert rules.held(tokens) == retention.rows_held(tokens) == kept.sum(1).max() == kept.sum(1).min()
    assert rules.voters_of(tokens) == retention.voters_of(tokens)
    assert [np.flatnonzero(head).tolist() for head in kept] == retention.choose(torch.from_numpy(votes)).tolist()
    assert [rules.chooser(layer) for layer in range(8)] == [retention.chooser(layer) for layer in range(8)]


@settings(max_examples=25)
@given(
    clusters=st.integers(3, 20).map(lambda half: 2 * half),
    select=st.sampled_from([5, 20, 49, 50, 80]),
    seed=st.integers(0, 1000),
)
def test_clusters_that_are_read_are_those_of_the_codec(clusters: int, select: int, seed: int) -> None:
    """The reference is `chosen_by_the_paper`, against which the codec's own selection is tested too."""
    rules = Rules(select=select)
    keys, q = some(seed, 2, clusters * rules.page_tokens, 16), some(seed + 1, 2, 3, 16)
    read = rules.read(clusters)
    if not rules.chooses(clusters):
        return
    found = chosen(np, rules, q, *bounds(np, rules, keys))
    assert found.shape == (2, read - 2, clusters - 2)
    for head in range(2):
        of_head = torch.from_numpy(keys[head]).unflatten(0, (clusters, -1))
        wanted = chosen_by_the_paper(torch.from_numpy(q[head]), of_head, select / 100, rules.least, rules.alpha)
        middle = sorted(np.flatnonzero(slot)[0] + 1 for slot in found[head])
        assert [0, *middle, clusters - 1] == wanted


def test_a_choice_that_two_levels_cannot_make_is_refused() -> None:
    keys, q = some(1, 1, 7 * RULES.page_tokens, 16), some(2, 1, 2, 16)
    with pytest.raises(ValueError, match="4 of 7 clusters cannot be chosen"):
        chosen(np, RULES, q, *bounds(np, RULES, keys))


def test_the_exponential_of_products_is_one() -> None:
    x = -np.geomspace(1e-3, 16, 50)
    assert (np.abs(exp(np, x) / np.exp(x) - 1) < np.abs(x) ** 3 / 360_000 + 1e-9).all()
    assert exp(np, np.array([-250.0])) < 1e-20


def _retention(rules: Rules) -> dict[str, Any]:
    shares = {"budget": f"{rules.budget}%", "voters": f"{rules.voters}%"}
    return {**shares, "first": rules.first, "last": rules.last, "pairs": True}


def _answers(given: dict[str, Any], prompt: tuple[int, ...], tokens: int) -> list[int]:
    codec = CodecConfig.model_validate({"name": "mpcache", "settings": given})
    worker = load_worker(ModelConfig(path=str(SHIPPED), dtype="float32"), codec)
    answer = generate(worker, greedy("r", prompt, tokens, ignore_eos=True))
    return [token.token_id for token in answer]


@pytest.mark.slow
def test_a_run_in_the_clear_answers_as_the_codec_does(model: Model) -> None:
    """The whole shipped model runs. hackkv keeps KV in FP16, and its weights are not folded."""
    task = model.task(2 * SHORT, 6, ("full", "static", "mpcache", "mpcache-rows"))
    learned, _ = model.expected(task)
    prompt, sizes = model.prompt(2 * SHORT), {"page_tokens": RULES.page_tokens, "alpha": str(RULES.alpha)}
    selection = {"select": f"{RULES.select}%", "least": RULES.least}
    for name, chosen_by in {
        "full": {"budget": "100%", "select": "100%"},
        "static": {**_retention(RULES), "select": "100%"},
        "mpcache": {**_retention(RULES), **selection},
    }.items():
        assert learned["tokens"][name] == _answers({**sizes, **chosen_by}, prompt, 6), name
    assert learned["tokens"]["mpcache-rows"] == learned["tokens"]["mpcache"]
    assert RULES.chooses(RULES.held(2 * SHORT) // RULES.page_tokens)


def test_a_party_is_told_its_own_secret_only(model: Model, tmp_path: Path) -> None:
    task = model.task(SHORT, 3, ("full", "mpcache"))
    job = Job(1, addresses(2), "SEMI2K", 18, 60.0, task, None, "weights.npz")
    write_job(job, tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    assert len(set(job.addresses)) == 2
    assert all(address.startswith("127.0.0.1:") for address in job.addresses)
    assert runs(task) == 1 + 4 + 1 + 3 + 2 * (2 + 4 * 3) * 2


SAYS = 'import sys; print(\'{"run": "prefill", "seconds": 1}\', flush=True); '
ENDS: dict[str, tuple[list[str], float, str]] = {
    "dies": (
        [SAYS + "sys.exit('no such luck')", "sys.stdin.read()"],
        WAIT_S,
        "exit code 1, after 'prefill': no such luck",
    ),
    "is killed": (
        [SAYS + "import os; os.kill(os.getpid(), 9)", "sys.stdin.read()"],
        WAIT_S,
        "party 0 ended with exit code -9",
    ),
    "says nothing": (["sys.stdin.read()", "sys.stdin.read()"], 1.0, "silent for 1 s, after they met"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_lost_party_is_one_line_and_leaves_nobody(end: str) -> None:
    programs, limit_s, said = ENDS[end]
    commands = [[sys.executable, "-c", f"import sys; {program}"] for program in programs]
    before = {child.pid for child in psutil.Process().children()}
    with closing(run_parties(commands, limit_s, ROOT)) as saying, pytest.raises(PartyLost) as lost:
        list(saying)
    assert said in str(lost.value)
    assert "\n" not in str(lost.value)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_parties_that_end_well_are_heard_to_the_end() -> None:
    commands = [[sys.executable, "-c", SAYS] for _ in range(3)]
    with closing(run_parties(commands, WAIT_S, ROOT)) as saying:
        assert sorted(rank for rank, _ in saying) == [0, 1, 2]


def cell(protocol: str, tokens: int, seconds: float = 1.0) -> Cell:
    heard = [
        (rank, {"run": f"{name}{run}", "seconds": seconds, "bytes": 4e6 if name == "full" else 1e6, "sends": 100})
        for rank in (0, 1)
        for name in ("full", "mpcache")
        for run in (": attend", ": rest", ": bounds")
    ]
    costs = mean([*heard, (0, {"met": "spu"}), *((rank, {**heard[0][1], "run": "prefill"}) for rank in (0, 1))], 2)
    return Cell(protocol, 2, tokens, 2, costs, {"full": Answer("a|b", 3), "mpcache": Answer("ab", 1)}, (100, 99))


def test_tables_say_what_selection_saves(tmp_path: Path) -> None:
    """Bounds are made once, so they are not counted per token. A record is read back unchanged."""
    about = {"command": "make private", "machine": "a machine", "versions": "spu 1"}
    text, record = section(tmp_path, about, [cell("SEMI2K", 1024), cell("ABY3", 256)])
    assert "| SEMI2K, 2 | 1024 | mpcache | 64 | 0.5 | 50 | 0.50 | 0.51 | 4.00 | 1.01 | 1 | 100 | 1.00 | 4.00 |" in text
    assert "| SEMI2K, 2 | 1024 | prefill | 4 | 100 | 1.00 |" in text
    assert "| SEMI2K, 2 | 1024 | mpcache: bounds | 1 | 100 | 1.00 |" in text
    assert "| ABY3, 2 | 256 | 99 of 100 | mpcache | 1 of 3 | `ab` |" in text
    assert "`a\\|b`" in text
    assert (tmp_path / "private.png").stat().st_size > 0
    again = [Cell.of(each) for each in json.loads(json.dumps(record))["cells"]]
    assert again == [cell("ABY3", 256), cell("SEMI2K", 1024)]
    assert Cost(0.0, 377e6, 2).linked_s == pytest.approx(1.0003)


def test_a_run_keeps_what_others_recorded(tmp_path: Path) -> None:
    about = {"command": "make private", "machine": "a machine", "versions": "spu 1"}
    (tmp_path / "private.md").write_text("# Private\n\n<!-- measured -->\n<!-- /measured -->\n")
    for measured in ([cell("ABY3", 256), cell("ABY3", 512)], [cell("ABY3", 512, seconds=7.0)]):
        write_section(tmp_path, "measured", *section(None, about, _with_recorded(tmp_path, measured)), page="private")
    assert _with_recorded(tmp_path, []) == [cell("ABY3", 256), cell("ABY3", 512, seconds=7.0)]
    assert (tmp_path / "private.md").read_text().count("### A decoded token") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sizes", "100"], "'100' is not multiples of 64"),
        (["--protocols", "ABY4"], "'ABY4' is unknown; known: ABY3, SEMI2K, CHEETAH"),
        (["--variants", "full,none"], "'none' is unknown; known: full, static"),
        (["--out", "/no/folder"], "'/no/folder' does not exist"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["--python", sys.executable, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert named in done.output


def test_an_interpreter_without_spu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--python", sys.executable, "--sizes", "64", "--tokens", "2", "--variants", "full"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "ABY3, 64 tokens: party" in done.output
    assert "No module named 'jax'" in done.output


def with_spu(test: Callable[..., None]) -> Callable[..., None]:
    skipped = pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="make private has not made .venv-private")
    marked: Callable[..., None] = pytest.mark.slow(pytest.mark.timeout(1800)(skipped(test)))
    return marked


@with_spu
@pytest.mark.parametrize("protocol", ["ABY3", "SEMI2K"])
def test_parties_answer_as_in_the_clear(model: Model, protocol: str) -> None:
    task = model.task(SHORT, 3, ("full", "static", "dynamic"))
    expected = model.expected(task)
    found, versions = measure(PYTHON, protocol, model, task, expected, WAIT_S)
    assert "spu 0.9.5" in versions
    assert [answer.as_in_the_clear for answer in found.answers.values()] == [3, 3, 3]
    held, same = found.kept
    assert held == 3 * 2 * RULES.held(SHORT)
    assert same >= 0.95 * held
    assert found.per_token("static", ("attend",)).bytes < found.per_token("full", ("attend",)).bytes
    assert found.parties == PROTOCOLS[protocol]


@with_spu
def test_answers_from_dealt_kv_are_the_same(model: Model) -> None:
    task = model.task(2 * SHORT, 2, ("mpcache", "mpcache-rows"), dealt=True)
    found, _ = measure(PYTHON, "SEMI2K", model, task, model.expected(task), WAIT_S)
    assert [answer.as_in_the_clear for answer in found.answers.values()] == [2, 2]
    assert "prefill" not in found.costs


@with_spu
def test_a_party_that_is_killed_ends_the_run(model: Model, tmp_path: Path) -> None:
    """One of three parties is killed after they have connected."""
    task = model.task(64, 2, ("full",))
    np.savez(tmp_path / "weights.npz", **model.weights)  # type: ignore[arg-type]
    commands, where = list[list[str]](), addresses(3)
    for rank in range(3):
        prompt, weights = model.prompt(64) if rank == 0 else None, str(tmp_path / "weights.npz") if rank == 1 else None
        write_job(Job(rank, where, "ABY3", 18, WAIT_S, task, prompt, weights), tmp_path / f"{rank}.json")
        commands.append([str(PYTHON), "-m", "bench.private.party", str(tmp_path / f"{rank}.json")])
    before = {child.pid for child in psutil.Process().children()}

    def kill_the_third() -> None:
        with closing(run_parties(commands, WAIT_S, ROOT)) as saying:
            for _, said in saying:
                if "run" in said:
                    parties = [child for child in psutil.Process().children() if child.pid not in before]
                    sockets = [each for party in parties for each in party.net_connections()]
                    assert {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
                    parties[2].kill()

    with pytest.raises(PartyLost, match="ended with exit code"):
        kill_the_third()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_dealt_kv_takes_the_place_of_the_prompt(model: Model) -> None:
    task = model.task(2 * SHORT, 3, ("full", "mpcache"))
    learned, dealt = model.expected(task)
    again = respond(InTheClear(), replace(task, dealt=True), None, model.weights, dealt)
    assert again == learned
    with pytest.raises(AssertionError):
        respond(InTheClear(), model.task(64, 2, tuple(VARIANTS)), None, None)
