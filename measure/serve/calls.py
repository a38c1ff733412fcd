"""The requests to send, and when: from a shape of lengths or from a JSONL trace, with real text for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hackkv.errors import ConfigError
from measure.serve.prompts import PromptMaker
from measure.serve.shapes import Shape


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load. `at_s` counts seconds from the start of the run."""

    at_s: float
    prompt: str
    prompt_tokens: int
    """By this program's count. The report prefers the server's count."""
    output_tokens: int


class TraceRequest(BaseModel):
    """One line of a trace: a text or a prompt length, an output length, and an arrival time. Other keys are ignored.

    The names are those of Mooncake's and AIPerf's traces and of vLLM's custom data sets. `timestamp` is in
    milliseconds from the start.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    prompt: str | None = Field(default=None, min_length=1, validation_alias=AliasChoices("prompt", "text_input"))
    input_length: int | None = Field(
        default=None, ge=1, le=1 << 24, validation_alias=AliasChoices("input_length", "prompt_tokens")
    )
    output_length: int = Field(
        ge=1, le=1 << 24, validation_alias=AliasChoices("output_length", "output_tokens", "max_tokens")
    )
    timestamp: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_a_prompt(self) -> TraceRequest:
        if self.prompt is None and self.input_length is None:
            raise PydanticCustomError("prompt", "neither prompt nor input_length is given")
        return self


def read_trace(path: Path) -> list[TraceRequest]:
    """Every line of the file, in the order of arrival. Raises `ConfigError` naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path}: {error}") from error
    trace = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            trace.append(TraceRequest.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ConfigError(f"--trace: {path}:{number}: {f'{field}: ' if field else ''}{first['msg']}") from error
    if not trace:
        raise ConfigError(f"--trace: {path}: no requests")
    if len({line.timestamp is None for line in trace}) > 1:
        raise ConfigError(f"--trace: {path}: some lines have a timestamp and some have none")
    return sorted(trace, key=lambda line: line.timestamp or 0.0)


def from_shape(
    shape: Shape, arrivals: Sequence[float], prompts: PromptMaker, rng: np.random.Generator
) -> list[PlannedRequest]:
    """One call for each time of `arrivals`."""
    sizes = zip(shape.prompt.draw(len(arrivals), rng), shape.output.draw(len(arrivals), rng), strict=True)
    return [
        PlannedRequest(at_s, *prompts.text(prompt_tokens, rng), output_tokens)
        for at_s, (prompt_tokens, output_tokens) in zip(arrivals, sizes, strict=True)
    ]


def from_trace(
    trace: Sequence[TraceRequest],
    arrivals: Sequence[float],
    scale: float,
    prompts: PromptMaker,
    rng: np.random.Generator,
) -> list[PlannedRequest]:
    """One call for each line of `trace`; `scale` stretches lengths, but not texts."""
    calls = []
    for at_s, line in zip(arrivals, trace, strict=True):
        if line.prompt is not None:
            text, tokens = line.prompt, prompts.count(line.prompt)
        else:
            assert line.input_length is not None
            text, tokens = prompts.text(max(1, round(line.input_length * scale)), rng)
        calls.append(PlannedRequest(at_s, text, tokens, max(1, round(line.output_length * scale))))
    return calls
