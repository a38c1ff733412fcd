"""The bases of every JSON object that a client sends, and of every whole body."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Data = bytes | bytearray
"""A body as it came. A large one is not copied: that would hold up the event loop."""


class Strict(BaseModel):
    """A JSON object in which a misspelt key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Body(Strict):
    """The body of a request."""

    model: str | None = None
    """Its name as `/v1/models` has it, or nothing."""


class Prompted(Body):
    """A body that asks for text after one or several prompts."""

    def stand_in(self, *, repeated: bool) -> dict[str, Any]:
        """The fields that hold the prompts, as JSON, with as little in them as a valid body can have.

        With `repeated`, texts stay that the answer repeats. So a body can be passed on without its prompts, where only
        their token ids are needed.
        """
        raise NotImplementedError
