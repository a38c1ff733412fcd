"""Small instances of the nouns that the tests of this folder send."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hackkv.nodes import NodeInfo
from hackkv.types import (
    DecodeJob,
    Fingerprint,
    Handoff,
    HandoffEnd,
    KvFrame,
    PlaneSpan,
    PrefillJob,
    Receipt,
    Request,
    Role,
    Sampling,
)

FINGERPRINT = Fingerprint((("wire", "1"), ("model", "tiny")))


def handoff(transfer_id: str = "t-1") -> Handoff:
    return Handoff(transfer_id, 0, FINGERPRINT, 130)


def frame(seq: int, payload: bytes = b"codes", transfer_id: str = "t-1") -> KvFrame:
    planes = (PlaneSpan("k.codes", len(payload), len(payload), 2**64 - 1),)
    return KvFrame(transfer_id, 0, seq, 1, 2, 0, 2, 3, 4, 0, planes, payload)


def end(num_frames: int, transfer_id: str = "t-1") -> HandoffEnd:
    return HandoffEnd(transfer_id, 0, num_frames, 7, checksum=0)


def receipt(transfer_id: str = "t-1", tokens: int = 130) -> Receipt:
    return Receipt(transfer_id, tokens, (("k.codes", 640),), 12, 4096, 0.25)


def request() -> Request:
    return Request("r-1", (1, 2, 3), Sampling(seed=-5, max_tokens=8))


def prefill_job() -> PrefillJob:
    return PrefillJob(request(), "t-1", 0, "127.0.0.1:1")


def decode_job() -> DecodeJob:
    return DecodeJob(request(), "t-1", 0)


def node_info(node_id: str = "d-1") -> NodeInfo:
    return NodeInfo(node_id, Role.DECODE, "127.0.0.1:1", "abc", "tiny", FINGERPRINT, 64, 4096, 100, 90, 0, 1, 2)


async def frames(
    count: int, payload: bytes = b"codes", transfer_id: str = "t-1"
) -> AsyncIterator[KvFrame | HandoffEnd]:
    for seq in range(count):
        yield frame(seq, payload, transfer_id)
    yield end(count, transfer_id)
