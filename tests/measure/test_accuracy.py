"""The accuracy harness on a tiny random checkpoint: it measures the serving path and reports what it measured."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from hackkv.codecs import CODECS
from hackkv.config import ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.exact import ExactKv, advance
from hackkv.model.generate import generate
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.types import Request, Sampling
from measure.accuracy import cells, results, stats, suite, variants
from measure.accuracy.__main__ import main
from measure.accuracy.data import read_records
from measure.accuracy.engine import batches, forced_decode, forced_prefill, greedy
from measure.accuracy.metrics import Measure, ScoredAnswer, first_divergence, score
from measure.accuracy.subject import Subject, load_subject
from measure.accuracy.suite import SUITE
from measure.accuracy.task import RunLimits, writes
from measure.accuracy.text import HELD_OUT_SHARE, MIN_CHARS, SKIPPED, is_held_out
from measure.accuracy.variants import EXACT, PLAIN, VARIANTS
from measure.tasks import Example, cut
from tests.pair import EVICTING
from tools.train_small import settings as trainer

OPEN_PAGE = [v for v in VARIANTS if v.codec.name not in EVICTING and v.codec.settings.get("open_page") != "requantize"]
NOTHING_SHIPS = [v for v in OPEN_PAGE if v.family != PLAIN]
"""Rows without those that leave the shipped calibration out. For a model without one, those would be duplicates."""
TRAINER = Path(trainer.__file__).with_name("small.yaml")


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("accuracy"), Tiny(head_dim=128, max_context=1024))


@pytest.fixture(scope="module", name="subject")
def make_subject(checkpoint: Path) -> Subject:
    return load_subject(ModelConfig(path=str(checkpoint), dtype="float32", threads=1, backend="reference"))


def window(subject: Subject, prompt: int, answer: int, seed: int = 0) -> Example:
    ids = cut(np.random.default_rng(seed), subject.filler, prompt + answer)
    return Example(ids[:prompt], ids[prompt:])


def test_perplexity_with_fp16_pages_is_that_of_exact_attention(subject: Subject) -> None:
    examples = [window(subject, 1, 299), window(subject, 1, 150, seed=1)]
    found = forced_prefill(subject.with_codec(EXACT.codec), examples)
    for example, answered in zip(examples, found, strict=True):
        ids = [*example.prompt.tolist(), *example.answer.tolist()]
        logits = subject.worker.model.logits(advance(subject.worker.model, [(ExactKv(), ids[:-1])]))
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
        assert score(Measure.PERPLEXITY, answered, subject.decode) == pytest.approx(float(wanted), abs=1e-3)


def test_rows_without_calibration_are_other_rows_where_none_ships(subject: Subject) -> None:
    """Therefore tests of `NOTHING_SHIPS` cover all codecs."""
    known = {v.name: subject.plan(v.codec).fingerprint() for v in OPEN_PAGE}
    plain = [v.name for v in OPEN_PAGE if v not in NOTHING_SHIPS]
    assert plain
    assert all(known[name] == known[name.removesuffix("-plain")] for name in plain)


@pytest.mark.grid(together=1, kinds=True)
@pytest.mark.parametrize("name", [v.name for v in NOTHING_SHIPS])
def test_decode_steps_score_as_prefill_does(subject: Subject, name: str) -> None:
    """By the open-page rule both modes are one function of the rows. The steps cross a page at every page size.

    Scores agree up to rounding: a sum in another order may change one 8-bit code of Q or P, so single tokens may
    differ more.
    """
    examples = [window(subject, 120, 16), window(subject, 57, 12, seed=1)]
    (variant,) = (v for v in NOTHING_SHIPS if v.name == name)
    worker = subject.with_codec(variant.codec)
    for one, other in zip(forced_prefill(worker, examples), forced_decode(worker, examples), strict=True):
        gaps = np.abs(one.nll - other.nll)
        assert np.median(gaps) < 1e-4
        assert gaps.max() < 1e-2


def test_requantizing_the_open_page_shows(subject: Subject) -> None:
    """The ablation must not silently run the rule that it ablates."""
    example = window(subject, 120, 16)
    (no_rqe,) = variants.choose(["hack-no-rqe"])[1:]
    worker = subject.with_codec(no_rqe.codec)
    (prefill,), (decode,) = forced_prefill(worker, [example]), forced_decode(worker, [example])
    assert np.abs(prefill.nll - decode.nll).mean() > 1e-2


@pytest.mark.parametrize("name", ["fp16", "hack"])
def test_greedy_writes_what_one_request_gets(subject: Subject, name: str) -> None:
    (variant,) = (v for v in VARIANTS if v.name == name)
    worker = subject.with_codec(variant.codec)
    examples = [window(subject, 70, 9), window(subject, 40, 5, seed=1)]
    for example, answered in zip(examples, greedy(worker, examples), strict=True):
        sampling = Sampling(seed=0, max_tokens=len(example.answer), temperature=0.0)
        tokens = generate(worker, Request("r", tuple(example.prompt.tolist()), sampling))
        ends = worker.model.spec.eos_ids
        assert answered.ids.tolist() == [token.token_id for token in tokens if token.token_id not in ends]


def test_batches_keep_the_order_and_the_bound(subject: Subject) -> None:
    examples = [Example(np.zeros(size, np.int64), np.zeros(1, np.int64)) for size in (9000, 6000, 20000, 10, 10)]
    assert [[len(e.prompt) for e in batch] for batch in batches(examples)] == [[9000], [6000], [20000], [10, 10]]


# Rows and tasks -----------------------------------------------------------------------------------------------------


def test_the_rows_are_valid_and_complete(subject: Subject) -> None:
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    prints = {v.name: subject.with_codec(v.codec).codec.fingerprint() for v in VARIANTS}
    made = {v.name: prints[v.name] for v in VARIANTS if v.family != variants.PLAIN}
    assert len(set(made.values())) == len(made), "two rows are the same codec"
    # No calibration ships for this model, so leaving it out changes nothing.
    assert all(prints[v.name] == prints[v.codec.name] for v in VARIANTS if v.family == variants.PLAIN)
    for setting in ("page_tokens", "rounding", "arithmetic", "stored_sums", "open_page", "k_bits"):
        values = {dict(fields).get(f"codec.{setting}") for fields in made.values()}
        assert len(values - {None}) > 1, f"no row varies {setting}"


def test_exact_kv_is_always_a_row() -> None:
    assert [v.name for v in variants.choose(["hack-128", "hack"])] == ["fp16", "hack", "hack-128"]


def test_unknown_rows_and_tasks_are_named(subject: Subject) -> None:
    with pytest.raises(ConfigError, match=r"--variants: 'hack-256' is unknown; known: fp16, hack-32"):
        variants.choose(["hack-256"])
    with pytest.raises(ConfigError, match=r"--tasks: 'copying' is unknown; known: reading"):
        suite.choose(["copying"], subject)


def test_models_that_chat_are_asked_other_tasks(subject: Subject) -> None:
    """The tiny model has a chat template, and the shipped one has none."""
    asked = {task.name for task in suite.choose([], subject)}
    assert asked == {"reading", "chat", "questions", "far", "humaneval"}
    silent = {task.name for task in SUITE if task.suits is writes}
    assert silent & asked == set()
    assert variants.choose([], ablations=False) == tuple(v for v in VARIANTS if v.name in CODECS)


@pytest.mark.slow
def test_every_task_builds_from_pythons_library_alone(subject: Subject) -> None:
    made = suite.prepared(subject, SUITE, RunLimits(samples=2, seed=3, longest=1024))
    empty = {task.name for task, prepared in made.items() if not prepared.tokens}
    assert empty == {"data", "far"}
    copy = next(prepared for task, prepared in made.items() if task.name == "copy")
    assert "at 2048: up to 2120 tokens of context needed, the limit is 1024" in copy.left_out
    others = suite.prepared(subject, SUITE, RunLimits(samples=2, seed=4, longest=1024))
    for task, prepared in made.items():
        drawn = task.name not in ("data", "reading", "longer", "continuing", "chat", "humaneval", "far")
        assert (prepared.digest != others[task].digest) is drawn, task.name


def test_the_split_is_the_trainers() -> None:
    corpus = trainer.load(TRAINER).corpus
    assert (corpus.held_out, corpus.min_chars) == (HELD_OUT_SHARE, MIN_CHARS)
    assert set(corpus.skip) <= SKIPPED
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in root.glob("*.py")]
    assert 0 < sum(map(is_held_out, names)) < 0.1 * len(names)
    assert is_held_out("copyreg.py")
    assert not is_held_out("os.py")


# Scores -------------------------------------------------------------------------------------------------------------


def test_wilson_has_a_width_even_at_the_ends() -> None:
    assert stats.wilson(1.0, 10).low == pytest.approx(0.722, abs=1e-3)
    assert stats.wilson(0.0, 10).high == pytest.approx(0.278, abs=1e-3)
    half = stats.wilson(0.5, 100)
    assert [half.low, half.high] == pytest.approx([0.404, 0.596], abs=1e-3)


def test_intervals_shrink_with_samples_and_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    widths = [np.ptp([(i := stats.share(rng.uniform(size=n))).low, i.high]) for n in (10, 100, 1000)]
    assert widths == sorted(widths, reverse=True)
    held = [(i := stats.share(rng.uniform(size=40))).low <= 0.5 <= i.high for _ in range(200)]
    assert 0.9 < np.mean(held) < 0.99
    held = [(i := stats.change(rng.normal(size=6), np.zeros(6))).low <= 0 <= i.high for _ in range(400)]
    assert 0.9 < np.mean(held) < 0.99, "few samples must not look certain"


def test_shares_of_yes_and_no_are_wilsons_and_others_bootstrapped() -> None:
    assert stats.share(np.array([0.0, 1.0, 1.0])).method == "wilson"
    assert stats.share(np.array([0.5, 0.5])).method == "wilson"
    assert stats.share(np.array([0.2, 0.5, 1.0])).method == "bootstrap"


def test_paired_changes_see_what_noise_would_hide() -> None:
    easy_and_hard = np.random.default_rng(0).uniform(1, 6, 30)
    worse = stats.ratio(easy_and_hard + 0.05, easy_and_hard)
    assert [worse.value, worse.low, worse.high] == pytest.approx([math.expm1(0.05)] * 3)
    alone = stats.perplexity(easy_and_hard)
    assert alone.low * 1.3 < alone.value < alone.high / 1.3


def test_text_metrics(subject: Subject) -> None:
    truth, other = subject.encode("return the first line"), subject.encode("return the last line")

    def of(measure: Measure, said: np.typing.NDArray[np.int64]) -> float:
        return score(measure, ScoredAnswer(said, truth, np.empty(0)), subject.decode)

    assert of(Measure.EDIT, truth) == of(Measure.ROUGE1, truth) == of(Measure.FOUND, truth) == 1
    assert of(Measure.ROUGE1, other) == pytest.approx(0.75)
    assert 0.5 < of(Measure.EDIT, other) < 1
    assert of(Measure.FOUND, other) == of(Measure.WHOLE, other) == 0


def test_first_divergence() -> None:
    one, shorter = np.array([1, 2, 3]), np.array([1, 2])
    assert first_divergence(one, one) is None
    assert first_divergence(np.array([1, 5, 3]), one) == 1
    assert first_divergence(shorter, one) == 2


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"}', "answer: Field required"),
        ('{"prompt": "a", "answer": 4}', "answer: Input should be a valid string"),
        ('{"prompt": "", "answer": "b"}', "prompt: String should have at least 1 character"),
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
    ],
)
def test_bad_data_names_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a\u2028b", "answer": "b", "other": 1}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=f"data.jsonl:3: {complaint}"):
        read_records(path)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: no records"):
        read_records(tmp_path / "empty.jsonl")


def test_the_command_measures_and_reports(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "mine.jsonl"
    records = [{"prompt": "import os\nimport ", "answer": "sys"}, {"prompt": "x = 1\n" * 500, "answer": "y"}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "reports" / "small"
    arguments = ["--model", str(checkpoint), "--variants", "hack,hack-paper", "--tasks", "copy,code,data"]
    arguments += ["--samples", "2", "--longest", "600", "--backend", "reference", "--out", str(out)]
    assert main([*arguments, "--data", str(data), "--jobs", "2"]) == 0
    (model,) = cells.models(out)
    found = results.read(model)
    assert [row.name for row in found.rows] == ["fp16", "hack", "hack-paper"]
    assert {(s.task, s.point) for s in found.scores} == {("copy", 128), ("copy", 512), ("code", 512), ("data", 0)}
    for cell in found.scores:
        assert cell.score.low <= cell.score.value <= cell.score.high
        assert cell.variant != "fp16" or cell.change.value == 0
    assert [len(one.first_divergences) for one in found.agreement] == [3, 3]
    report = out.with_suffix(".md").read_text()
    for part in ("data 1 of 2 prompts: up to ", "can't\nprove", "| `hack-paper` |", "Greedy agreement", "!["):
        assert part in report
    assert (model / "accuracy.png").stat().st_size < 150_000
    out.with_suffix(".md").unlink()
    assert main(["--render", "--out", str(out)]) == 0
    assert out.with_suffix(".md").read_text() == report
    (model / "tried.md").write_text("Rotations helped.\n")
    assert main(["--render", "--out", str(out)]) == 0
    assert "### What was tried" in out.with_suffix(".md").read_text()
    assert "\nRotations helped.\n" in out.with_suffix(".md").read_text()
    assert "hack-paper" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped(checkpoint: Path, tmp_path: Path) -> None:
    """Points with a current file are not measured again. Points that were deleted, not reached or changed are."""
    out = tmp_path / "small"
    arguments = ["--model", str(checkpoint), "--variants", "hack", "--tasks", "copy", "--longest", "600"]
    arguments += ["--backend", "reference", "--out", str(out), "--jobs", "1"]
    assert main([*arguments, "--samples", "1"]) == 0
    files = {path.parent.name: path for path in out.glob("*/*/copy.json")}
    before = {name: path.stat().st_mtime_ns for name, path in files.items()}
    files["hack"].unlink()
    assert main([*arguments, "--samples", "1"]) == 0
    after = {name: path.stat().st_mtime_ns for name, path in files.items()}
    assert before["fp16"] == after["fp16"]
    assert before["hack"] != after["hack"]
    whole = json.loads(files["hack"].read_text())
    first = dict(list(whole["points"].items())[:1])
    files["hack"].write_text(json.dumps({**whole, "points": first, "complete": False, "seconds": 1e6}))
    assert main([*arguments, "--render"]) == 0
    assert "Not finished, so that points are missing: hack/copy." in out.with_suffix(".md").read_text()
    assert main([*arguments, "--samples", "1"]) == 0
    again = json.loads(files["hack"].read_text())
    assert (again["points"], again["complete"]) == (whole["points"], True)
    assert again["seconds"] >= 1e6, "the time of the run that was stopped counts"
    assert main([*arguments, "--samples", "2"]) == 0
    assert files["fp16"].stat().st_mtime_ns != after["fp16"]


@pytest.mark.slow
def test_points_that_were_measured_are_not_lost_to_a_shorter_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--longest` changes the material of all rows, and a file holds one material."""
    out = tmp_path / "small"
    arguments = ["--model", str(checkpoint), "--variants", "fp16", "--tasks", "copy", "--samples", "1"]
    arguments += ["--backend", "reference", "--out", str(out), "--jobs", "1"]
    assert main([*arguments, "--longest", "600"]) == 0
    (file,) = out.glob("*/fp16/copy.json")
    before = file.read_bytes()
    assert main([*arguments, "--longest", "300"]) == 2
    assert "copy.json: was measured at 512, too, which this run leaves out" in capsys.readouterr().err
    assert file.read_bytes() == before
    file.write_bytes(before.replace(b'"wire_version":"', b'"wire_version":"not '))
    assert main([*arguments, "--longest", "300"]) == 2, "other rows are compared with a file that is not current, too"
    assert "was measured at 512, too" in capsys.readouterr().err
    assert main([*arguments, "--longest", "300", "--again"]) == 0
    assert list(json.loads(file.read_text())["points"]) == ["128"]


def test_the_command_says_what_is_wrong(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(checkpoint), "--variants", "hack-256"]) == 2
    assert "hack-256" in capsys.readouterr().err
    assert main(["--model", str(checkpoint), "--tasks", "data"]) == 2
    assert "no task is left" in capsys.readouterr().err
    assert main(["--render", "--out", str(tmp_path / "none")]) == 2
    assert "none: no file of `hackkv eval`" in capsys.readouterr().err
    broken = tmp_path / "model" / "fp16" / "copy.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{}")
    assert main(["--render", "--out", str(tmp_path)]) == 2
    assert "copy.json: not a file of `hackkv eval`" in capsys.readouterr().err
