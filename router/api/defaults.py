"""Sampling settings that a checkpoint proposes for requests that name none: generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hackkv.errors import CheckpointError


class SamplingDefaults(BaseModel):
    """What generation_config.json proposes, as vLLM reads it; where it is silent, OpenAI's own defaults."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read `folder`/generation_config.json, if there is one. Raises `CheckpointError` naming the file and the field."""
    path = folder / "generation_config.json"
    try:
        proposed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(proposed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(proposed).__name__}")
    try:
        # transformers writes null for "not set".
        return SamplingDefaults.model_validate({name: value for name, value in proposed.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
