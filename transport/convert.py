"""Control nouns <-> protobuf. Only this module, `convert_request`, `convert_kv` and `convert_failure` know both."""

from __future__ import annotations

from dataclasses import dataclass

from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.logprobs import PromptLogprobs
from hackkv.nodes import CodecLoss, Lease, NodeInfo, WireAddress
from hackkv.page_names import MARK_BYTES, MOST_MARKS
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    HandedOff,
    HandoffFailed,
    Landed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Reserved,
    Role,
    Swapped,
    Token,
)
from transport.coder import (
    MAX_PROMPT_TOKENS,
    MAX_STATS,
    MAX_WIRES,
    Malformed,
    MessageCoder,
    capped,
    duration,
    refuse_request,
    required,
    text,
)
from transport.convert_kv import (
    pack_fingerprint,
    pack_held,
    pack_receipt,
    unpack_fingerprint,
    unpack_held,
    unpack_receipt,
)
from transport.convert_request import (
    pack_prompt_logprobs,
    pack_request,
    pack_token,
    unpack_prompt_logprobs,
    unpack_request,
    unpack_token,
)
from transport.pb import kv_pb2 as pb

_ROLE_TO_PB = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLE_FROM_PB = {number: role for role, number in _ROLE_TO_PB.items()}


PrefillPart = PrefillEvent | PromptLogprobs
"""An event, or log-probabilities that belong to the `Prefilled` after them (`transport.prefill_parts`)."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arguments of `PrefillNode.assign`."""

    transfer_id: str
    epoch: int
    decode_address: str
    held: HeldKv = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Empty:
    """No arguments, or no answer."""


def _pack_prefill_job(job: PrefillJob) -> pb.PrefillJob:
    return pb.PrefillJob(
        request=pack_request(job.request),
        transfer_id=job.transfer_id,
        epoch=job.epoch,
        decode_address=job.decode_address,
        handoff=job.handoff,
        held=pack_held(job.held),
    )


def _unpack_prefill_job(message: pb.PrefillJob) -> PrefillJob:
    required("request", message)
    return PrefillJob(
        request=unpack_request(message.request),
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        decode_address=text("decode_address", message.decode_address),
        handoff=message.handoff,
        held=unpack_held(message.held),
    )


def _pack_assignment(assignment: Assignment) -> pb.Assignment:
    return pb.Assignment(
        transfer_id=assignment.transfer_id,
        epoch=assignment.epoch,
        decode_address=assignment.decode_address,
        held=pack_held(assignment.held),
    )


def _unpack_assignment(message: pb.Assignment) -> Assignment:
    return Assignment(
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        decode_address=text("decode_address", message.decode_address),
        held=unpack_held(message.held),
    )


def _pack_prefill_event(event: PrefillPart) -> pb.PrefillEvent:
    if isinstance(event, PromptLogprobs):
        return pb.PrefillEvent(prompt_logprobs=pack_prompt_logprobs(event))
    if isinstance(event, HandedOff):
        handed_off = pb.HandedOff(
            receipt=pack_receipt(event.receipt),
            swap_wait_s=event.swap_wait_s,
            transfer_s=event.transfer_s,
            overlapped_bytes=event.overlapped_bytes,
            epoch=event.epoch,
        )
        return pb.PrefillEvent(handed_off=handed_off)
    if isinstance(event, HandoffFailed):
        failed = pb.HandoffFailed(epoch=event.epoch, code=event.code, message=event.message)
        return pb.PrefillEvent(handoff_failed=failed)
    prefilled = pb.Prefilled(
        token=pack_token(event.token),
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
        quantize_s=event.quantize_s,
        computed_tokens=event.computed_tokens,
        prompt_logprobs=pack_prompt_logprobs(event.prompt_logprobs),
        wire_encode_s=event.wire_encode_s,
        fetched_tokens=event.fetched_tokens,
        fetched_bytes=event.fetched_bytes,
        fetch_s=event.fetch_s,
    )
    return pb.PrefillEvent(prefilled=prefilled)


def _unpack_prefilled(message: pb.Prefilled) -> Prefilled:
    required("token", message)
    return Prefilled(
        token=unpack_token(message.token),
        queue_s=duration("queue_s", message.queue_s),
        prefill_s=duration("prefill_s", message.prefill_s),
        quantize_s=duration("quantize_s", message.quantize_s),
        computed_tokens=message.computed_tokens,
        prompt_logprobs=unpack_prompt_logprobs(message.prompt_logprobs),
        wire_encode_s=duration("wire_encode_s", message.wire_encode_s),
        fetched_tokens=message.fetched_tokens,
        fetched_bytes=message.fetched_bytes,
        fetch_s=duration("fetch_s", message.fetch_s),
    )


def _unpack_handed_off(message: pb.HandedOff) -> HandedOff:
    required("receipt", message)
    return HandedOff(
        receipt=unpack_receipt(message.receipt),
        swap_wait_s=duration("swap_wait_s", message.swap_wait_s),
        transfer_s=duration("transfer_s", message.transfer_s),
        overlapped_bytes=message.overlapped_bytes,
        epoch=message.epoch,
    )


def _unpack_prefill_event(message: pb.PrefillEvent) -> PrefillPart:
    match message.WhichOneof("body"):
        case "prompt_logprobs":
            return unpack_prompt_logprobs(message.prompt_logprobs)
        case "prefilled":
            return _unpack_prefilled(message.prefilled)
        case "handed_off":
            return _unpack_handed_off(message.handed_off)
        case "handoff_failed":
            failed = message.handoff_failed
            return HandoffFailed(failed.epoch, text("code", failed.code), text("message", failed.message))
    raise Malformed("body", "no member of the oneof is set")


def _pack_decode_job(job: DecodeJob) -> pb.DecodeJob:
    return pb.DecodeJob(
        request=pack_request(job.request), transfer_id=job.transfer_id, epoch=job.epoch, emitted=job.emitted
    )


def _unpack_decode_job(message: pb.DecodeJob) -> DecodeJob:
    required("request", message)
    return DecodeJob(
        request=unpack_request(message.request),
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        emitted=tuple(capped("emitted", message.emitted, MAX_PROMPT_TOKENS)),
    )


def _pack_decode_event(event: DecodeEvent) -> pb.DecodeEvent:
    if isinstance(event, Token):
        return pb.DecodeEvent(token=pack_token(event))
    if isinstance(event, Reserved):
        return pb.DecodeEvent(reserved=pb.Reserved(held=pack_held(event.held)))
    if isinstance(event, Landed):
        return pb.DecodeEvent(landed=pb.Landed(receipt=pack_receipt(event.receipt)))
    if isinstance(event, Swapped):
        return pb.DecodeEvent(swapped=pb.Swapped())
    decoded = pb.Decoded(
        queue_s=event.queue_s,
        decode_s=event.decode_s,
        attend_s=event.attend_s,
        approximation_s=event.approximation_s,
        swapped_s=event.swapped_s,
    )
    return pb.DecodeEvent(decoded=decoded)


def _unpack_decoded(message: pb.Decoded) -> Decoded:
    return Decoded(
        queue_s=duration("queue_s", message.queue_s),
        decode_s=duration("decode_s", message.decode_s),
        attend_s=duration("attend_s", message.attend_s),
        approximation_s=duration("approximation_s", message.approximation_s),
        swapped_s=duration("swapped_s", message.swapped_s),
    )


def _unpack_decode_event(message: pb.DecodeEvent) -> DecodeEvent:
    match message.WhichOneof("body"):
        case "token":
            return unpack_token(message.token)
        case "reserved":
            return Reserved(unpack_held(message.reserved.held))
        case "landed":
            required("receipt", message.landed)
            return Landed(unpack_receipt(message.landed.receipt))
        case "swapped":
            return Swapped()
        case "decoded":
            return _unpack_decoded(message.decoded)
    raise Malformed("body", "no member of the oneof is set")


def _pack_node_info(info: NodeInfo) -> pb.NodeInfo:
    return pb.NodeInfo(
        node_id=info.node_id,
        role=_ROLE_TO_PB[info.role],
        address=info.address,
        incarnation=info.incarnation,
        model=info.model,
        fingerprint=pack_fingerprint(info.fingerprint),
        page_tokens=info.page_tokens,
        max_context=info.max_context,
        total_pages=info.total_pages,
        free_pages=info.free_pages,
        queued_tokens=info.queued_tokens,
        running=info.running,
        waiting=info.waiting,
        stats=[pb.Stat(name=name, value=value) for name, value in info.stats],
        draining=info.draining,
        kernels=info.kernels,
        wires=[pb.WireAddress(wire=one.wire, address=one.address) for one in info.wires],
        loss=None if info.loss is None else _pack_loss(info.loss),
        marks=info.marks,
        control_version=info.control_version,
    )


def _pack_loss(loss: CodecLoss) -> pb.CodecLoss:
    return pb.CodecLoss(kl=loss.kl, top1=loss.top1, perplexity_ratio=loss.perplexity_ratio, tokens=loss.tokens)


def _unpack_node_info(message: pb.NodeInfo) -> NodeInfo:
    required("fingerprint", message)
    if message.role not in _ROLE_FROM_PB:
        raise Malformed("role", f"{message.role} is not a Role")
    # A gauge may be NaN or infinite, as in Prometheus: a node must not fall out of the fleet over a statistic.
    stats = tuple((text("stats", stat.name), stat.value) for stat in capped("stats", message.stats, MAX_STATS))
    return NodeInfo(
        node_id=text("node_id", message.node_id),
        role=_ROLE_FROM_PB[message.role],
        address=text("address", message.address),
        incarnation=text("incarnation", message.incarnation),
        model=text("model", message.model),
        fingerprint=unpack_fingerprint(message.fingerprint),
        page_tokens=message.page_tokens,
        max_context=message.max_context,
        total_pages=message.total_pages,
        free_pages=message.free_pages,
        queued_tokens=message.queued_tokens,
        running=message.running,
        waiting=message.waiting,
        stats=stats,
        draining=message.draining,
        kernels=text("kernels", message.kernels),
        wires=tuple(_unpack_wire(wire) for wire in capped("wires", message.wires, MAX_WIRES)),
        loss=_unpack_loss(message.loss) if message.HasField("loss") else None,
        marks=_unpack_marks(message.marks) if message.HasField("marks") else None,
        control_version=message.control_version,
    )


def _unpack_loss(message: pb.CodecLoss) -> CodecLoss:
    return CodecLoss(message.kl, message.top1, message.perplexity_ratio, message.tokens)


def _unpack_marks(marks: bytes) -> bytes:
    if len(marks) % MARK_BYTES:
        raise Malformed("marks", f"{len(marks)} bytes are no marks of {MARK_BYTES} bytes")
    return capped("marks", marks, MOST_MARKS * MARK_BYTES)


def _unpack_wire(message: pb.WireAddress) -> WireAddress:
    return WireAddress(text("wires", message.wire), text("wires", message.address))


def _pack_lease(lease: Lease) -> pb.Lease:
    return pb.Lease(ttl_s=lease.ttl_s)


def _unpack_lease(message: pb.Lease) -> Lease:
    return Lease(duration("ttl_s", message.ttl_s))


PREFILL_JOB = MessageCoder(pb.PrefillJob, _pack_prefill_job, _unpack_prefill_job, refuse_request)
PREFILL_EVENT = MessageCoder(pb.PrefillEvent, _pack_prefill_event, _unpack_prefill_event)
ASSIGNMENT = MessageCoder(pb.Assignment, _pack_assignment, _unpack_assignment, refuse_request)
DECODE_JOB = MessageCoder(pb.DecodeJob, _pack_decode_job, _unpack_decode_job, refuse_request)
DECODE_EVENT = MessageCoder(pb.DecodeEvent, _pack_decode_event, _unpack_decode_event)
NODE_INFO = MessageCoder(pb.NodeInfo, _pack_node_info, _unpack_node_info)
LEASE = MessageCoder(pb.Lease, _pack_lease, _unpack_lease)
EMPTY = MessageCoder(pb.Empty, lambda _: pb.Empty(), lambda _: Empty())
