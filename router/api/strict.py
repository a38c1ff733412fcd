"""The bases of every JSON object that a client sends, and of every whole body."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A JSON object in which a misspelt key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Body(Strict):
    """The body of a request."""

    model: str | None = None
    """Its name as `/v1/models` has it, or nothing."""
