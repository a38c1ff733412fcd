"""The user's own data: JSONL with one {"prompt": ..., "answer": ...} per line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hackkv.errors import ConfigError


class DatasetRecord(BaseModel):
    """One line. Other keys are allowed and ignored, so that published data sets can be used as they are."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)


def read_records(path: Path) -> tuple[DatasetRecord, ...]:
    """Every record of the file. Raises `ConfigError` naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: {path}: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(DatasetRecord.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ConfigError(f"--data: {path}:{number}: {f'{field}: ' if field else ''}{first['msg']}") from error
    if not records:
        raise ConfigError(f"--data: {path}: no records")
    return tuple(records)
