"""Runs every row against every column, several at a time on one compute thread each.

Small models spend their time between operations, not in them, so jobs side by side keep the cores busier than threads
inside an operation would. Results do not depend on it: each job has a codec of its own, and in FP32 the model's rows do
not depend on their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from measure.accuracy.engine import batches
from measure.accuracy.metrics import Answered
from measure.accuracy.subject import Subject
from measure.accuracy.suite import Column
from measure.accuracy.variants import Variant

OnAnswers = Callable[[Variant, Column, int], None]
"""Called with the number of samples that were just answered, from any thread."""

Answers = list[dict[str, list[Answered]]]
"""Per column, by the name of the variant."""


def answer_all(
    subject: Subject, variants: Sequence[Variant], columns: Sequence[Column], jobs: int, on_answers: OnAnswers
) -> Answers:
    """Every column answered by every variant. Raises what the forward pass raises."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [
                {v.name: pool.submit(_answer, subject, v, column, on_answers) for v in variants} for column in columns
            ]
            return [{name: future.result() for name, future in column.items()} for column in futures]
        except BaseException:  # after Ctrl-C too, jobs that are still queued must not run
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _answer(subject: Subject, variant: Variant, column: Column, on_answers: OnAnswers) -> list[Answered]:
    worker = subject.with_codec(variant.codec)
    answers: list[Answered] = []
    for batch in batches(column.examples):
        answers += column.task.run(worker, batch)
        on_answers(variant, column, len(batch))
    return answers
