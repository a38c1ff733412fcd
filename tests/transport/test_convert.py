"""Every noun survives the wire. Decoders refuse malformed input, and no input crashes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hackkv import errors, types
from hackkv.errors import FrameRefused, HackkvError, RequestError, TransferError
from hackkv.held import HeldKv
from hackkv.logprobs import PromptLogprobs
from hackkv.nodes import CodecLoss, Lease, NodeInfo, WireAddress
from hackkv.page_names import MARK_BYTES, MOST_MARKS
from hackkv.types import (
    DecodeJob,
    Fingerprint,
    Finish,
    HandoffEnd,
    KvFrame,
    KvLayout,
    Logprob,
    PlaneSpan,
    PrefillJob,
    Receipt,
    Role,
    Sampling,
    Token,
)
from tests.transport import nouns
from transport import convert, convert_kv
from transport.coder import MAX_PAYLOAD_BYTES, MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, MessageCoder
from transport.convert import Assignment
from transport.convert_failure import decode_failure, encode_failure
from transport.convert_kv import Accepted, Announced
from transport.convert_pair import MAX_KEY_BYTES, PAIR_MESSAGE, Hello, Paired, PairKey, Ready
from transport.pb import kv_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PARCELS = st.integers(1, MAX_PAYLOAD_BYTES)
TEXT = st.text(max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NOT_NEGATIVE = st.floats(0, allow_infinity=False)
ADDED = st.floats(-1e30, 1e30)
SECONDS = st.floats(0, 1e9)
LOGPROB = st.floats(allow_nan=False)


def short_tuples(item: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, max_size=4).map(tuple)


fingerprints = st.builds(Fingerprint, short_tuples(st.tuples(TEXT, TEXT)))
samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=U32,
    min_tokens=U32,
    temperature=NOT_NEGATIVE,
    top_p=NOT_NEGATIVE,
    top_k=U32,
    min_p=st.floats(0, 1),
    presence_penalty=ADDED,
    frequency_penalty=ADDED,
    repetition_penalty=st.floats(1e-6, 1e6),
    logit_bias=short_tuples(st.tuples(U32, ADDED)),
    stop_token_ids=short_tuples(U32),
    ignore_eos=st.booleans(),
    logprobs=st.none() | U32,
    prompt_logprobs=st.none() | U32,
)
requests = st.builds(types.Request, TEXT, short_tuples(U32), samplings, TEXT)
tokens = st.builds(
    Token,
    U32,
    U32,
    st.none() | st.sampled_from(Finish),
    st.none() | LOGPROB,
    short_tuples(st.builds(Logprob, U32, LOGPROB)),
)
scores = st.integers(0, 3).flatmap(
    lambda width: st.lists(
        st.tuples(LOGPROB, st.lists(st.tuples(U32, LOGPROB), min_size=width, max_size=width)), max_size=4
    )
)


def in_columns(scored: list[Any]) -> PromptLogprobs:
    columns = PromptLogprobs()
    columns.extend(scored)
    return columns


planes = st.builds(PlaneSpan, TEXT, U64, U64, U64, U32)
kv_frames = st.builds(KvFrame, TEXT, *(9 * [U32]), short_tuples(planes), st.binary(max_size=200))
bare_frames = kv_frames.map(lambda frame: replace(frame, payload=b""))
pair_messages = (
    st.builds(Hello, TEXT)
    | st.builds(PairKey, TEXT, st.binary(max_size=200))
    | st.builds(Paired, U32)
    | st.builds(Ready, U32, PARCELS)
)
receipts = st.builds(Receipt, TEXT, U32, short_tuples(st.tuples(TEXT, U64)), U64, U64, SECONDS, SECONDS, U32)
held = st.builds(HeldKv, U32, U32)
FETCHED = (SECONDS, U32, U64, SECONDS)
HANDOFF_CODERS: tuple[MessageCoder[Any, Any], ...] = (convert_kv.PUSH_REQUEST, convert_kv.HANDOFF)
prefill_events = (
    st.builds(types.Prefilled, tokens, SECONDS, SECONDS, SECONDS, U32, scores.map(in_columns), *FETCHED)
    | st.builds(types.HandedOff, receipts, SECONDS, SECONDS, U64, U32)
    | st.builds(types.HandoffFailed, U32, TEXT, TEXT)
)
decode_events = (
    st.builds(types.Reserved, held)
    | st.builds(types.Landed, receipts)
    | tokens
    | st.builds(types.Swapped)
    | st.builds(types.Decoded, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
)
node_infos = st.builds(
    NodeInfo,
    TEXT,
    st.sampled_from(Role),
    TEXT,
    TEXT,
    TEXT,
    fingerprints,
    U32,
    U32,
    U64,
    U64,
    U64,
    U32,
    U32,
    short_tuples(st.tuples(TEXT, LOGPROB)),
    st.booleans(),
    TEXT,
    short_tuples(st.builds(WireAddress, TEXT, TEXT)),
    st.none() | st.builds(CodecLoss, LOGPROB, FINITE, LOGPROB, U32),
    st.none() | st.binary(max_size=5).map(lambda mark: mark * MARK_BYTES),
    U32,
)


FULL = pb.KvFrame(payload=b"codes")


def reported(marks: bytes) -> pb.NodeInfo:
    """A decode node's report."""
    return pb.NodeInfo(role=pb.ROLE_DECODE, fingerprint=pb.Fingerprint(), marks=marks)


CODERS: list[tuple[MessageCoder[Any, Any], st.SearchStrategy[Any]]] = [
    (convert_kv.FINGERPRINT, fingerprints),
    (convert_kv.LAYOUT, st.builds(KvLayout, U32, U32, U32, st.integers(1, 2**32 - 1))),
    (convert_kv.RECEIPT, receipts),
    (convert_kv.PUSH_REQUEST, kv_frames),
    *((coder, st.builds(types.Handoff, TEXT, U32, fingerprints, U32, held)) for coder in HANDOFF_CODERS),
    (convert_kv.PUSH_REQUEST, st.builds(HandoffEnd, TEXT, U32, U32, U32, U64)),
    (convert_kv.PUSH_REQUEST, st.builds(Announced, bare_frames, U32, U32, PARCELS)),
    (convert_kv.PUSH_REPLY, receipts | st.just(Accepted())),
    (PAIR_MESSAGE, pair_messages),
    (convert.PREFILL_JOB, st.builds(PrefillJob, requests, TEXT, U32, TEXT, st.booleans(), held)),
    (convert.PREFILL_EVENT, prefill_events),
    (convert.ASSIGNMENT, st.builds(Assignment, TEXT, U32, TEXT, held)),
    (convert.DECODE_JOB, st.builds(DecodeJob, requests, TEXT, U32, short_tuples(U32))),
    (convert.DECODE_EVENT, decode_events),
    (convert.NODE_INFO, node_infos),
    (convert.LEASE, st.builds(Lease, SECONDS)),
]
EVERY_CODER = pytest.mark.parametrize(("coder", "noun"), CODERS, ids=lambda value: getattr(value, "_name", ""))


@EVERY_CODER
@given(data=st.data())
@settings(max_examples=40)
def test_round_trip(coder: MessageCoder[Any, Any], noun: st.SearchStrategy[Any], data: st.DataObject) -> None:
    value = data.draw(noun)
    assert coder.decode(coder.encode(value)) == value


@given(kv_frames | st.builds(KvFrame, TEXT, *(9 * [U32]), st.just(()), st.just(bytes(3 << 20))))
@settings(max_examples=60)
def test_the_short_cut_for_frames_makes_the_bytes_that_protobuf_makes(frame: KvFrame) -> None:
    assert convert_kv.encode_push_request(frame) == convert_kv.PUSH_REQUEST.encode(frame)


@EVERY_CODER
@given(junk=st.binary(max_size=100))
@settings(max_examples=40)
def test_junk_is_refused_by_name_or_decoded(coder: MessageCoder[Any, Any], noun: object, junk: bytes) -> None:
    try:
        coder.decode(junk)
    except (RequestError, TransferError):
        return


@EVERY_CODER
@given(data=st.data())
@settings(max_examples=40)
def test_flipped_bytes_are_refused_by_name_or_decoded(
    coder: MessageCoder[Any, Any], noun: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    wire = bytearray(coder.encode(data.draw(noun)))
    for _ in range(data.draw(st.integers(1, 4))):
        if wire:
            wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        coder.decode(bytes(wire))
    except (RequestError, TransferError):
        return


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", float("nan")), ("top_p", float("inf")), ("logit_bias", ((1, float("nan")),))],
)
def test_sampling_values_must_be_finite(field: str, value: object) -> None:
    sampling = Sampling(seed=1, max_tokens=1, **{field: value})  # type: ignore[arg-type]
    job = DecodeJob(types.Request("r", (1,), sampling), "t", 0)
    with pytest.raises(RequestError, match="must be finite") as caught:
        convert.DECODE_JOB.decode(convert.DECODE_JOB.encode(job))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", -1.0),
        ("min_p", 1.1),
        ("presence_penalty", 1e31),
        ("frequency_penalty", -1e31),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, 1e31),)),
    ],
)
def test_sampling_values_that_no_sampler_takes_are_refused(field: str, value: object) -> None:
    """The decoder refuses them, so only their own request fails."""
    sampling = Sampling(seed=1, max_tokens=1, **{field: value})  # type: ignore[arg-type]
    job = DecodeJob(types.Request("r", (1,), sampling), "t", 0)
    with pytest.raises(RequestError, match="must be from") as caught:
        convert.DECODE_JOB.decode(convert.DECODE_JOB.encode(job))
    assert caught.value.param == field


@pytest.mark.parametrize("size", [1, 5, 70_000])
def test_an_announced_parcel_comes_back_whether_its_planes_say_its_size_or_not(size: int) -> None:
    said = convert_kv.Announced(replace(nouns.frame(0), payload=b""), 1, 2, size)
    assert convert_kv.PUSH_REQUEST.decode(convert_kv.PUSH_REQUEST.encode(said)) == said


def test_absurd_sizes_are_refused() -> None:
    sampling = Sampling(seed=1, max_tokens=1)
    long_prompt = DecodeJob(types.Request("r", (1,) * (MAX_PROMPT_TOKENS + 1), sampling), "t", 0)
    with pytest.raises(RequestError, match="prompt_ids"):
        convert.DECODE_JOB.decode(convert.DECODE_JOB.encode(long_prompt))
    long_name = DecodeJob(types.Request("r" * (MAX_TEXT_CHARS + 1), (1,), sampling), "t", 0)
    with pytest.raises(RequestError, match="request_id"):
        convert.DECODE_JOB.decode(convert.DECODE_JOB.encode(long_name))
    with pytest.raises(FrameRefused, match="payload"):
        convert_kv.PUSH_REQUEST.decode(convert_kv.PUSH_REQUEST.encode(nouns.frame(0, bytes(MAX_PAYLOAD_BYTES + 1))))


@pytest.mark.parametrize(
    ("coder", "message", "why"),
    [
        (convert_kv.PUSH_REQUEST, pb.PushRequest(), "oneof"),
        (convert_kv.PUSH_REQUEST, pb.PushRequest(announced=pb.Announced(bytes=1)), "frame"),
        (convert_kv.PUSH_REQUEST, pb.PushRequest(announced=pb.Announced(frame=FULL, bytes=1)), "payload: must be"),
        (convert_kv.PUSH_REQUEST, pb.PushRequest(announced=pb.Announced(frame=pb.KvFrame())), "parcel of 0"),
        (PAIR_MESSAGE, pb.PairMessage(), "oneof"),
        (PAIR_MESSAGE, pb.PairMessage(ready=pb.Ready(bytes=MAX_PAYLOAD_BYTES + 1)), "parcel of 8388609"),
        (PAIR_MESSAGE, pb.PairMessage(key=pb.PairKey(value=bytes(MAX_KEY_BYTES + 1))), "value: 65537 bytes"),
        (convert_kv.PUSH_REPLY, pb.PushReply(), "oneof"),
        (convert.PREFILL_EVENT, pb.PrefillEvent(), "oneof"),
        (convert.DECODE_EVENT, pb.DecodeEvent(), "oneof"),
        (convert.DECODE_EVENT, pb.DecodeEvent(landed=pb.Landed()), "receipt"),
        (convert.PREFILL_JOB, pb.PrefillJob(), "request"),
        (convert.DECODE_JOB, pb.DecodeJob(request=pb.Request()), "sampling"),
        (
            convert.DECODE_JOB,
            pb.DecodeJob(request=pb.Request(sampling=pb.Sampling(), prompt_ids=b"abc")),
            "prompt_ids: 3",
        ),
        (convert.NODE_INFO, pb.NodeInfo(fingerprint=pb.Fingerprint()), "role"),
        (convert.NODE_INFO, pb.NodeInfo(role=pb.ROLE_DECODE), "fingerprint"),
        (convert.NODE_INFO, reported(bytes(MARK_BYTES + 1)), "marks: 9 bytes are no marks of 8 bytes"),
        (convert.NODE_INFO, reported(bytes(MARK_BYTES * (MOST_MARKS + 1))), "marks: .* at most 32768 are accepted"),
        (convert.DECODE_EVENT, pb.DecodeEvent(token=pb.Token(finish=99)), "finish"),  # type: ignore[arg-type]
        (convert.DECODE_EVENT, pb.DecodeEvent(token=pb.Token(logprob=float("nan"))), "logprob"),
        (convert.LEASE, pb.Lease(ttl_s=-1.0), "ttl_s"),
        (convert_kv.LAYOUT, pb.KvLayout(), "page_tokens"),
    ],
)
def test_incomplete_messages_name_the_field(coder: MessageCoder[Any, Any], message: Any, why: str) -> None:
    with pytest.raises((RequestError, TransferError), match=why):
        coder.decode(message.SerializeToString())


@pytest.mark.parametrize(
    "job",
    [
        PrefillJob(nouns.request(), "t", -1),
        PrefillJob(nouns.request(), "\ud800", 0),
        PrefillJob(replace(nouns.request(), prompt_ids=(1, -1)), "t", 0),
        PrefillJob(replace(nouns.request(), prompt_ids=(1, 2**32)), "t", 0),
    ],
)
def test_values_that_do_not_fit_are_refused_at_the_sender(job: PrefillJob) -> None:
    with pytest.raises(RequestError, match="cannot send PrefillJob"):
        convert.PREFILL_JOB.encode(job)


def error_classes(cls: type[HackkvError] = HackkvError) -> list[type[HackkvError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in error_classes(child))]


@pytest.mark.parametrize("cls", [cls for cls in error_classes() if cls.__module__ == errors.__name__])
@given(message=st.text(max_size=50))
@settings(max_examples=20)
def test_errors_round_trip(cls: type[HackkvError], message: str) -> None:
    rebuilt = decode_failure(encode_failure(cls(message)))
    assert (type(rebuilt), str(rebuilt), vars(rebuilt)) == (cls, message, vars(cls(message)))


def test_an_unreadable_failure_is_still_an_error_of_ours() -> None:
    assert isinstance(decode_failure(b"\xff"), TransferError)
    assert type(decode_failure(pb.Failure(code="new", message="m").SerializeToString())) is HackkvError
    odd = pb.Failure(code="overloaded", retry_after_s=float("nan"))
    assert isinstance(decode_failure(odd.SerializeToString()), TransferError)


def test_every_event_has_a_message() -> None:
    assert {cls.__name__ for cls in get_args(types.PrefillEvent) + get_args(types.DecodeEvent)} <= {
        message.name for message in pb.DESCRIPTOR.message_types_by_name.values()
    }
