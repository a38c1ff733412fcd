"""The columns of the table: every task, the models that it suits, and its measures. A new one is a module and a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from hackkv.errors import ConfigError
from measure.accuracy import chat, continuing, engine, humaneval, questions, reading, synthetic
from measure.accuracy.metrics import TAIL, Measure
from measure.accuracy.subject import Subject
from measure.accuracy.synthetic import COPY_CUE, COPY_SEGMENT, EVERY_RECORD, FREE_TOKENS, RESTATE_CUE, RESTATE_WORDS
from measure.accuracy.task import Prepared, RunLimits, Task, anyone, chats, on_request, writes

_REACH = (1024, 2048, 4096)


def _synthetic(
    name: str,
    says: str,
    make: synthetic.Make,
    run: engine.Run,
    measures: tuple[Measure, ...],
    points: tuple[int, ...],
    samples: int,
) -> Task:
    suits = on_request if make is synthetic.data else writes
    return Task(name, says, 1, measures, synthetic.Asked(make, run, measures, points, samples), suits)


SUITE: Final = (
    Task(
        "reading",
        "held-out text through prefill, by how much of it was read; beside exact KV, block by block of "
        f"{reading.BLOCK} tokens",
        1,
        (Measure.PERPLEXITY, Measure.KL, Measure.TOP1),
        reading.prepare,
        anyone,
    ),
    Task(
        "longer",
        "more text through prefill, read as far as the longest window goes; beside exact KV, block by block of "
        f"{reading.BLOCK} tokens",
        1,
        (Measure.PERPLEXITY, Measure.KL, Measure.TOP1),
        reading.prepare_longer,
        on_request,
    ),
    Task(
        "continuing",
        f"the {continuing.AFTER} tokens of held-out text after a prompt, by its length, from what it left in its "
        "cache; beside exact KV",
        1,
        (Measure.PERPLEXITY, Measure.KL, Measure.TOP1),
        continuing.prepare,
        on_request,
    ),
    Task(
        "chat",
        f"requests in the model's own chat format, greedy answers of up to {chat.MOST_TOKENS} tokens",
        1,
        (Measure.LENGTH, Measure.UNFINISHED, Measure.SAME),
        chat.prepare,
        chats,
    ),
    Task(
        "questions",
        "magic numbers, key-value pairs and random tokens inside held-out text, asked for at its end, by context "
        "length; answers are decode steps",
        1,
        (Measure.NEEDLE, Measure.RECALL, Measure.COPY),
        partial(questions.prepare, questions.CONTEXTS),
        chats,
    ),
    Task(
        "far",
        "the same questions about longer contexts",
        1,
        (Measure.NEEDLE, Measure.RECALL, Measure.COPY),
        partial(questions.prepare, questions.FAR),
        chats,
    ),
    Task(
        "humaneval",
        f"prompts of HumanEval, greedy completions of up to {humaneval.MOST_TOKENS} tokens, its tests run in a sandbox",
        1,
        (Measure.SIMILAR, Measure.PASS, Measure.KEPT),
        humaneval.prepare,
        chats,
    ),
    _synthetic(
        "perplexity",
        "held-out text, teacher-forced through prefill",
        synthetic.window,
        engine.forced_prefill,
        (Measure.PERPLEXITY, Measure.TAIL),
        (1024,),
        16,
    ),
    _synthetic(
        "decode",
        f"the last {TAIL} tokens of the same windows, one decode step each",
        synthetic.window_tail,
        engine.forced_decode,
        (Measure.PERPLEXITY,),
        (1024,),
        16,
    ),
    _synthetic(
        "copy",
        f"{COPY_SEGMENT - COPY_CUE} random tokens again, by distance; decode steps",
        synthetic.copy,
        engine.forced_decode,
        (Measure.TOKENS,),
        (128, 512, 1024, 2048),
        12,
    ),
    _synthetic(
        "recall",
        "one key-value pair of many, by context length; decode steps",
        synthetic.recall,
        engine.forced_decode,
        (Measure.WHOLE, Measure.TOKENS),
        _REACH,
        8,
    ),
    _synthetic(
        "needle",
        "one fact inside real text, by context length; decode steps",
        synthetic.needle,
        engine.forced_decode,
        (Measure.WHOLE, Measure.TOKENS),
        _REACH,
        6,
    ),
    _synthetic(
        "code",
        f"{FREE_TOKENS} greedy tokens after held-out Python",
        synthetic.code,
        engine.greedy,
        (Measure.EDIT,),
        (512,),
        24,
    ),
    _synthetic(
        "restate",
        f"summary-like: {RESTATE_WORDS} words at the head of real text, restated greedily from the first {RESTATE_CUE}",
        synthetic.restate,
        engine.greedy,
        (Measure.ROUGE1,),
        (512, 1024),
        12,
    ),
    _synthetic(
        "data",
        "your prompts, greedy to the length of your answers",
        synthetic.data,
        engine.greedy,
        (Measure.FOUND, Measure.EDIT, Measure.ROUGE1),
        (0,),
        EVERY_RECORD,
    ),
)


def choose(names: Sequence[str], subject: Subject) -> tuple[Task, ...]:
    """The named tasks in the suite's order. Without names, the tasks that suit the model, and `data` if it has records.

    Raises `ConfigError` naming an unknown task.
    """
    known = [task.name for task in SUITE]
    for name in names:
        if name not in known:
            raise ConfigError(f"--tasks: {name!r} is unknown; known: {', '.join(known)}")
    if names:
        return tuple(task for task in SUITE if task.name in names)
    return tuple(task for task in SUITE if task.suits(subject) or (task.name == "data" and subject.records))


def prepared(subject: Subject, tasks: Sequence[Task], limits: RunLimits) -> dict[Task, Prepared]:
    """The material of every task. Raises `ConfigError` naming a task whose material cannot be made."""
    made = dict[Task, Prepared]()
    for task in tasks:
        try:
            made[task] = task.prepare(subject, limits)
        except ValueError as error:
            raise ConfigError(f"task {task.name}: {error}") from error
    return made
