"""The job that the parent gives to a system's process, and its result. Peers' environments need nothing for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

WARM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """Greedy answers of `tokens` tokens to each prompt, one after another, or all at once if `together`."""

    gguf: str
    folder: str
    """The same model as a Hugging Face checkpoint of BF16 weights."""
    cache: str
    """An existing folder, kept between jobs, for a form of the model that a system has to make."""
    kv: str
    threads: int
    tokens: int
    prompts: Sequence[Sequence[int]]
    together: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to the first token, and from there to the last."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """An answer for each prompt. If all were asked `together`, only the seconds until the last answer had ended."""

    version: str
    answers: Sequence[Answer] = ()
    together_s: float = 0.0

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Result:
        """The result from the fields that `asdict` made of it."""
        return cls(**{**fields, "answers": [Answer(**each) for each in fields["answers"]]})


class System(Protocol):
    """A peer with the model loaded."""

    version: str

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Answer one request."""

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Answer all requests at once."""


def main(measure: Callable[[Job], Result]) -> None:
    """Do the job in the file of the first argument, and write the result into the file of the second."""
    fields: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = measure(Job(**fields))
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)), encoding="utf-8")


def ask(system: System, job: Job) -> Result:
    """Warm the system up, so that its weights are in memory, then do the job."""
    system.answer(job.prompts[0][:WARM_TOKENS], 2)
    if not job.together:
        return Result(system.version, [system.answer(prompt, job.tokens) for prompt in job.prompts])
    began = perf_counter()
    system.answer_all(job.prompts, job.tokens)
    return Result(system.version, together_s=perf_counter() - began)
