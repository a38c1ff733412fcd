"""Errors <-> protobuf: the code, the message word for word, and the extra field of the class, if it has one."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from hackkv.errors import HackkvError, TransferError, by_code
from transport.pb import kv_pb2 as pb

MAX_FAILURE_CHARS = 16_000
"""Longer error messages are cut, so that a failure always fits into the trailing metadata."""

_EXTRA_FIELDS = ("retry_after_s", "param", "reason", "span")


def pack_failure(error: HackkvError) -> pb.Failure:
    """To protobuf."""
    return pb.Failure(
        code=error.code,
        message=str(error).encode("utf-8", "replace").decode()[:MAX_FAILURE_CHARS],
        **{name: getattr(error, name, None) for name in _EXTRA_FIELDS},
    )


def unpack_failure(failure: pb.Failure) -> HackkvError:
    """Rebuild the error that a peer reported, as the same class with the same message and extra field."""
    error = by_code(failure.code, failure.message)
    for name in _EXTRA_FIELDS:
        if failure.HasField(name) and hasattr(error, name):
            setattr(error, name, getattr(failure, name))
    retry_after_s = getattr(error, "retry_after_s", 0.0)
    if not (math.isfinite(retry_after_s) and retry_after_s >= 0.0):
        return TransferError(f"the peer reported {failure.code} with retry_after_s={retry_after_s}")
    return error


def encode_failure(error: HackkvError) -> bytes:
    """Serialize an error for trailing metadata."""
    return pack_failure(error).SerializeToString()


def decode_failure(data: bytes) -> HackkvError:
    """Rebuild an error from trailing metadata."""
    try:
        return unpack_failure(pb.Failure.FromString(data))
    except DecodeError as exc:
        return TransferError(f"the peer reported an unreadable failure: {exc}")
