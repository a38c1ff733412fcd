"""Fields of every request that generates, whatever API it follows: rules for drawing tokens, and our own fields.

Sampling settings that are left out, or null, are the checkpoint's own (`router.api.defaults`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from router.api.fields import NullIs, Whole
from router.api.strict import Prompted


class Sampled(Prompted):
    """Fields of all routes that generate. Those that the route's own API lacks are named as in vLLM."""

    stream: Annotated[bool, NullIs(False)] = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[int | None, Field(ge=-1, lt=1 << 31), Whole()] = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NullIs(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NullIs(0.0)] = 0.0
    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=10)
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63), Whole()] = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 30), Whole(), NullIs(0)] = 0
    ignore_eos: Annotated[bool, NullIs(False)] = False
    skip_special_tokens: Annotated[bool, NullIs(True)] = True
    return_stages: Annotated[bool, NullIs(False)] = False
    """Adds `hackkv` to the answer: where the time went, in seconds, and what was moved, in bytes."""
    cache_salt: Annotated[str, NullIs("")] = ""
    """Only requests of equal salt share KV of a common prefix: one tenant cannot time another's prompts."""

    def sampled(self) -> dict[str, Any]:
        """These fields as far as the client gave them."""
        return {name: getattr(self, name) for name in Sampled.model_fields if name in self.model_fields_set}
