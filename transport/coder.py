"""Coders: one noun becomes bytes and back, and every decoded field passes checks.

`MessageCoder.encode` and `MessageCoder.decode` raise the coder's own named error for anything malformed. A decoder
raises no other exception, whatever the bytes. Counts and lengths have caps that an honest peer cannot reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, EncodeError, Message

from hackkv.errors import FrameRefused, HackkvError, RequestError, TransferError

MAX_PAYLOAD_BYTES = 8 << 20
"""Largest payload of one KV frame; senders aim at 1-2 MiB."""
MAX_REQUEST_BYTES = MAX_PAYLOAD_BYTES + (128 << 10)
"""Largest message that a server accepts: a full frame and its header."""
MAX_REPLY_BYTES = 64 << 20
"""Largest message that a client accepts; prompt log-probabilities of a long prompt are tens of MiB."""

MAX_TEXT_CHARS = 4096
MAX_PROMPT_TOKENS = 1 << 20
MAX_LOGIT_BIAS = 1 << 16
MAX_STOP_TOKENS = 1 << 12
MAX_ALTERNATIVES = 1 << 10
MAX_PLANES = 1024
MAX_FINGERPRINT_FIELDS = 256
MAX_STATS = 4096
MAX_WIRES = 64

Noun = TypeVar("Noun")
Pb = TypeVar("Pb", bound=Message)
Many = TypeVar("Many", bound=Sized)


class Malformed(ValueError):
    """A message breaks the contract at `field`; becomes the coder's named error before it leaves this package."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def text(field: str, value: str) -> str:
    """Pass a string of at most `MAX_TEXT_CHARS` characters."""
    if len(value) > MAX_TEXT_CHARS:
        raise Malformed(field, f"{len(value)} characters, at most {MAX_TEXT_CHARS} are accepted")
    return value


def capped(field: str, items: Many, limit: int) -> Many:
    """Pass a repeated field with at most `limit` elements."""
    if len(items) > limit:
        raise Malformed(field, f"{len(items)} elements, at most {limit} are accepted")
    return items


def parcel_size(value: int) -> int:
    """Pass the size of a parcel, in bytes."""
    if not 0 < value <= MAX_PAYLOAD_BYTES:
        raise Malformed("bytes", f"a parcel of {value}, from 1 to {MAX_PAYLOAD_BYTES} are accepted")
    return value


def finite(field: str, value: float) -> float:
    """Pass a number that is neither NaN nor infinite."""
    if not math.isfinite(value):
        raise Malformed(field, f"must be finite, got {value}")
    return value


def within(field: str, value: float, least: float, most: float = math.inf) -> float:
    """Pass a number that is finite and lies from `least` to `most`."""
    if not least <= finite(field, value) <= most:
        raise Malformed(field, f"must be from {least:g} to {most:g}, got {value}")
    return value


def duration(field: str, value: float) -> float:
    """Pass a duration in seconds: finite and not negative."""
    if not (math.isfinite(value) and value >= 0.0):
        raise Malformed(field, f"must be a duration in seconds, got {value}")
    return value


def not_nan(field: str, value: float) -> float:
    """Pass a number that may be infinite (the log-probability of a banned token is), but not NaN."""
    if math.isnan(value):
        raise Malformed(field, "must not be NaN")
    return value


def required(field: str, message: Message) -> None:
    """Require that the message field `field` of `message` is set."""
    if not message.HasField(field):
        raise Malformed(field, f"missing in {message.DESCRIPTOR.name}")


def refuse_request(message: str, field: str | None) -> HackkvError:
    """Name a malformed job."""
    return RequestError(message, param=field)


def refuse_transfer(message: str, field: str | None) -> HackkvError:
    """Name a malformed message between nodes."""
    return TransferError(message)


def refuse_frame(message: str, field: str | None) -> HackkvError:
    """Name a malformed message of a KV stream."""
    return FrameRefused(message, reason="malformed")


@dataclass(frozen=True, slots=True)
class MessageCoder(Generic[Noun, Pb]):
    """One noun's wire form: its message class, the two directions, and the error that malformed input becomes."""

    message: type[Pb]
    pack: Callable[[Noun], Pb]
    unpack: Callable[[Pb], Noun]
    refuse: Callable[[str, str | None], HackkvError] = refuse_transfer

    def encode(self, noun: Noun) -> bytes:
        """Serialize. Raises the coder's error if a value does not fit its field (negative count, 64-bit token id)."""
        try:
            return self.pack(noun).SerializeToString()
        except (TypeError, ValueError, OverflowError, EncodeError) as exc:
            raise self.refuse(f"cannot send {self._name}: {exc}", _field(exc)) from exc

    def decode(self, data: bytes) -> Noun:
        """Parse and check. Raises the coder's error, naming the field at fault."""
        try:
            return self.unpack(self.message.FromString(data))
        except (DecodeError, Malformed) as exc:
            raise self.refuse(f"malformed {self._name}: {exc}", _field(exc)) from exc

    @property
    def _name(self) -> str:
        return self.message.DESCRIPTOR.name


def _field(exc: Exception) -> str | None:
    return exc.field if isinstance(exc, Malformed) else None
