"""The log-probabilities of a long prompt travel in parts. The receiver joins them into one event again.

They take tens of MiB. A single message with all of them would hold up the event loops at both ends, and other calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hackkv.errors import TransferError
from hackkv.logprobs import PromptLogprobs
from hackkv.types import Prefilled, PrefillEvent, PrefillJob
from transport.coder import MAX_REPLY_BYTES
from transport.convert import PrefillPart
from transport.trunk import TrunkCall

PART_BYTES: Final = 128 << 10
"""Bytes of log-probabilities in one part."""


def in_parts(event: PrefillEvent) -> Iterator[PrefillPart]:
    """The parts of an event: rows of a long prompt's log-probabilities, then the event itself with the last rows."""
    if not isinstance(event, Prefilled):
        yield event
        return
    columns, width = event.prompt_logprobs, event.prompt_logprobs.width
    rows = max(1, PART_BYTES // _row_bytes(columns))
    last = max(0, len(columns) - 1) // rows * rows
    for start in range(0, last, rows):
        yield _rows(columns, width, start, start + rows)
    yield replace(event, prompt_logprobs=_rows(columns, width, last, len(columns))) if last else event


class PrefillCall(TrunkCall[PrefillJob, PrefillPart]):
    """A call of `PrefillNode.prefill`. It joins the parts of an event."""

    def __aiter__(self) -> PrefillCall:
        return self

    async def __anext__(self) -> PrefillEvent:
        """The next event. Raises `TransferError` for parts that do not fit one another."""
        part = await super().__anext__()
        if not isinstance(part, PromptLogprobs):
            return part
        columns = part
        while isinstance(part := await super().__anext__(), PromptLogprobs):
            await self._join(columns, part)
        if not isinstance(part, Prefilled):
            await self.aclose()
            raise TransferError(f"malformed PrefillEvent: prompt_logprobs before a {type(part).__name__}")
        await self._join(columns, part.prompt_logprobs)
        return replace(part, prompt_logprobs=columns)

    async def _join(self, columns: PromptLogprobs, more: PromptLogprobs) -> None:
        """Append rows. Raises `TransferError` if they have another width or exceed the size of a message in total."""
        total = (len(columns) + len(more)) * _row_bytes(columns)
        if not more.own or more.width != columns.width or total > MAX_REPLY_BYTES:
            await self.aclose()
            raise TransferError(
                f"malformed PrefillEvent: prompt_logprobs of {len(more)} tokens with {more.width} alternatives each "
                f"after those of {len(columns)} with {columns.width}; at most {MAX_REPLY_BYTES} bytes are accepted"
            )
        columns.own.extend(more.own)
        columns.top_ids.extend(more.top_ids)
        columns.top.extend(more.top)


def _row_bytes(columns: PromptLogprobs) -> int:
    return columns.own.itemsize + columns.width * (columns.top_ids.itemsize + columns.top.itemsize)


def _rows(columns: PromptLogprobs, width: int, start: int, end: int) -> PromptLogprobs:
    tops = slice(start * width, end * width)
    return PromptLogprobs(columns.own[start:end], columns.top_ids[tops], columns.top[tops])
