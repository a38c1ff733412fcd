"""KV nouns <-> protobuf: what travels on a `KvReceiver.Push` stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hackkv.errors import HackkvError
from hackkv.held import HeldKv
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, KvLayout, PlaneSpan, Receipt
from transport.coder import (
    MAX_FINGERPRINT_FIELDS,
    MAX_PAYLOAD_BYTES,
    MAX_PLANES,
    Malformed,
    MessageCoder,
    capped,
    duration,
    parcel_size,
    refuse_frame,
    required,
    text,
)
from transport.convert_failure import pack_failure, unpack_failure
from transport.pb import kv_pb2 as pb


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver asked for the first frame."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A frame whose payload comes over a link: `size` bytes, parcel `number` of the receiver's pair `pair`."""

    frame: KvFrame
    """Its payload is empty."""
    pair: int
    number: int
    size: int


PushRequest = Handoff | KvFrame | HandoffEnd | Announced
PushReply = Accepted | Receipt | HackkvError


def pack_fingerprint(fingerprint: Fingerprint) -> pb.Fingerprint:
    """To protobuf."""
    return pb.Fingerprint(fields=[pb.FingerprintField(name=name, value=value) for name, value in fingerprint.fields])


def unpack_fingerprint(message: pb.Fingerprint) -> Fingerprint:
    """From protobuf. Raises `Malformed`."""
    capped("fingerprint", message.fields, MAX_FINGERPRINT_FIELDS)
    return Fingerprint(tuple((text("name", field.name), text("value", field.value)) for field in message.fields))


def _pack_layout(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
    )


def _unpack_layout(message: pb.KvLayout) -> KvLayout:
    if not message.page_tokens:
        raise Malformed("page_tokens", "must be positive")
    return KvLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        page_tokens=message.page_tokens,
    )


def pack_held(held: HeldKv) -> pb.HeldKv:
    """To protobuf."""
    return pb.HeldKv(pages=held.pages, exact=held.exact)


def unpack_held(message: pb.HeldKv) -> HeldKv:
    """From protobuf."""
    return HeldKv(message.pages, message.exact)


def _pack_handoff(handoff: Handoff) -> pb.Handoff:
    return pb.Handoff(
        transfer_id=handoff.transfer_id,
        epoch=handoff.epoch,
        fingerprint=pack_fingerprint(handoff.fingerprint),
        num_tokens=handoff.num_tokens,
        held=pack_held(handoff.held),
    )


def _unpack_handoff(message: pb.Handoff) -> Handoff:
    required("fingerprint", message)
    return Handoff(
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        fingerprint=unpack_fingerprint(message.fingerprint),
        num_tokens=message.num_tokens,
        held=unpack_held(message.held),
    )


def _pack_plane(plane: PlaneSpan) -> pb.PlaneSpan:
    return pb.PlaneSpan(
        name=plane.name,
        raw_bytes=plane.raw_bytes,
        coded_bytes=plane.coded_bytes,
        checksum=plane.checksum,
        method=plane.method,
    )


def _unpack_plane(message: pb.PlaneSpan) -> PlaneSpan:
    return PlaneSpan(
        name=text("name", message.name),
        raw_bytes=message.raw_bytes,
        coded_bytes=message.coded_bytes,
        checksum=message.checksum,
        method=message.method,
    )


def _pack_frame(frame: KvFrame) -> pb.KvFrame:
    return pb.KvFrame(
        transfer_id=frame.transfer_id,
        epoch=frame.epoch,
        seq=frame.seq,
        layer=frame.layer,
        layer_count=frame.layer_count,
        head_start=frame.head_start,
        head_count=frame.head_count,
        page_start=frame.page_start,
        page_count=frame.page_count,
        rows=frame.rows,
        planes=[_pack_plane(plane) for plane in frame.planes],
        payload=bytes(frame.payload),
    )


def _unpack_frame(message: pb.KvFrame) -> KvFrame:
    payload = message.payload  # each access copies the bytes out of the message, so this is the only one
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise Malformed("payload", f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted")
    return KvFrame(
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        seq=message.seq,
        layer=message.layer,
        layer_count=message.layer_count,
        head_start=message.head_start,
        head_count=message.head_count,
        page_start=message.page_start,
        page_count=message.page_count,
        rows=message.rows,
        planes=tuple(_unpack_plane(plane) for plane in capped("planes", message.planes, MAX_PLANES)),
        payload=payload,
        header_bytes=message.ByteSize() - len(payload),
    )


def _pack_announced(noun: Announced) -> pb.Announced:
    size = 0 if noun.size == _declared(noun.frame) else noun.size
    frame = _pack_frame(noun.frame)
    return pb.Announced(frame=frame, pair=noun.pair, number=noun.number, bytes=size)


def _declared(frame: KvFrame) -> int:
    """Bytes of a frame's payload, as its planes declare them."""
    return sum(plane.coded_bytes for plane in frame.planes)


def _unpack_announced(message: pb.Announced) -> Announced:
    required("frame", message)
    if message.frame.payload:
        raise Malformed("payload", "must be empty in a frame that is announced")
    frame = _unpack_frame(message.frame)
    size = parcel_size(message.bytes or _declared(frame))
    return Announced(frame, message.pair, message.number, size)


def _pack_end(end: HandoffEnd) -> pb.HandoffEnd:
    return pb.HandoffEnd(
        transfer_id=end.transfer_id,
        epoch=end.epoch,
        num_frames=end.num_frames,
        first_token=end.first_token,
        checksum=end.checksum,
    )


def _unpack_end(message: pb.HandoffEnd) -> HandoffEnd:
    return HandoffEnd(
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        num_frames=message.num_frames,
        first_token=message.first_token,
        checksum=message.checksum,
    )


def pack_receipt(receipt: Receipt) -> pb.Receipt:
    """To protobuf."""
    return pb.Receipt(
        transfer_id=receipt.transfer_id,
        tokens=receipt.tokens,
        bytes_by_plane=[pb.PlaneBytes(name=name, bytes=count) for name, count in receipt.bytes_by_plane],
        header_bytes=receipt.header_bytes,
        fp16_bytes=receipt.fp16_bytes,
        receive_s=receipt.receive_s,
        wire_decode_s=receipt.wire_decode_s,
        held_tokens=receipt.held_tokens,
    )


def unpack_receipt(message: pb.Receipt) -> Receipt:
    """From protobuf. Raises `Malformed`."""
    planes = capped("bytes_by_plane", message.bytes_by_plane, MAX_PLANES)
    return Receipt(
        transfer_id=text("transfer_id", message.transfer_id),
        tokens=message.tokens,
        bytes_by_plane=tuple((text("name", plane.name), plane.bytes) for plane in planes),
        header_bytes=message.header_bytes,
        fp16_bytes=message.fp16_bytes,
        receive_s=duration("receive_s", message.receive_s),
        wire_decode_s=duration("wire_decode_s", message.wire_decode_s),
        held_tokens=message.held_tokens,
    )


def _pack_push_request(noun: PushRequest) -> pb.PushRequest:
    if isinstance(noun, KvFrame):
        return pb.PushRequest(frame=_pack_frame(noun))
    if isinstance(noun, Handoff):
        return pb.PushRequest(handoff=_pack_handoff(noun))
    if isinstance(noun, Announced):
        return pb.PushRequest(announced=_pack_announced(noun))
    return pb.PushRequest(end=_pack_end(noun))


def _unpack_push_request(message: pb.PushRequest) -> PushRequest:
    match message.WhichOneof("body"):
        case "frame":
            return _unpack_frame(message.frame)
        case "handoff":
            return _unpack_handoff(message.handoff)
        case "end":
            return _unpack_end(message.end)
        case "announced":
            return _unpack_announced(message.announced)
    raise Malformed("body", "no member of the oneof is set")


def _pack_push_reply(noun: PushReply) -> pb.PushReply:
    if isinstance(noun, Accepted):
        return pb.PushReply(accepted=pb.Accepted())
    if isinstance(noun, Receipt):
        return pb.PushReply(receipt=pack_receipt(noun))
    return pb.PushReply(failure=pack_failure(noun))


def _unpack_push_reply(message: pb.PushReply) -> PushReply:
    match message.WhichOneof("body"):
        case "accepted":
            return Accepted()
        case "receipt":
            return unpack_receipt(message.receipt)
        case "failure":
            return unpack_failure(message.failure)
    raise Malformed("body", "no member of the oneof is set")


_FRAME_TAG = bytes([pb.PushRequest.FRAME_FIELD_NUMBER << 3 | 2])
_PAYLOAD_TAG = bytes([pb.KvFrame.PAYLOAD_FIELD_NUMBER << 3 | 2])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_push_request(noun: PushRequest) -> bytes:
    """Give the bytes of `PUSH_REQUEST.encode`, with one copy of a frame's payload instead of two.

    Protobuf copies bytes into the message and again into its serialization. The payload is a frame's last field. So a
    frame without its payload is serialized, and the payload is appended.
    """
    if not isinstance(noun, KvFrame) or not noun.payload:
        return PUSH_REQUEST.encode(noun)
    head = KV_FRAME.encode(replace(noun, payload=b"")) + _PAYLOAD_TAG + _varint(len(noun.payload))
    return b"".join((_FRAME_TAG, _varint(len(head) + len(noun.payload)), head, bytes(noun.payload)))


HANDOFF = MessageCoder(pb.Handoff, _pack_handoff, _unpack_handoff)
FINGERPRINT = MessageCoder(pb.Fingerprint, pack_fingerprint, unpack_fingerprint)
LAYOUT = MessageCoder(pb.KvLayout, _pack_layout, _unpack_layout)
RECEIPT = MessageCoder(pb.Receipt, pack_receipt, unpack_receipt)
KV_FRAME = MessageCoder(pb.KvFrame, _pack_frame, _unpack_frame, refuse_frame)
PUSH_REQUEST = MessageCoder(pb.PushRequest, _pack_push_request, _unpack_push_request, refuse_frame)
PUSH_REPLY = MessageCoder(pb.PushReply, _pack_push_reply, _unpack_push_reply)
