"""Control nouns <-> protobuf. With `convert_kv` and `convert_failure`, the only code that knows both sides."""

from __future__ import annotations

from dataclasses import dataclass

from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    Finish,
    HandedOff,
    HandoffFailed,
    Landed,
    Lease,
    Logprob,
    NodeInfo,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Request,
    Reserved,
    Role,
    Sampling,
    Swapped,
    Token,
)
from transport.coder import (
    MAX_ALTERNATIVES,
    MAX_LOGIT_BIAS,
    MAX_PROMPT_TOKENS,
    MAX_STATS,
    MAX_STOP_TOKENS,
    Coder,
    Malformed,
    capped,
    duration,
    finite,
    not_nan,
    refuse_request,
    required,
    text,
)
from transport.convert_kv import pack_fingerprint, pack_receipt, unpack_fingerprint, unpack_receipt
from transport.pb import kv_pb2 as pb

_ROLE_TO_PB = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLE_FROM_PB = {number: role for role, number in _ROLE_TO_PB.items()}
_FINISH_TO_PB = {None: pb.FINISH_UNSPECIFIED, Finish.STOP: pb.FINISH_STOP, Finish.LENGTH: pb.FINISH_LENGTH}
_FINISH_FROM_PB = {number: finish for finish, number in _FINISH_TO_PB.items()}


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arguments of `PrefillNode.assign`."""

    transfer_id: str
    epoch: int
    decode_address: str


@dataclass(frozen=True, slots=True)
class Empty:
    """No arguments, or no answer."""


def _pack_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _unpack_sampling(message: pb.Sampling) -> Sampling:
    biases = capped("logit_bias", message.logit_bias, MAX_LOGIT_BIAS)
    return Sampling(
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=finite("temperature", message.temperature),
        top_p=finite("top_p", message.top_p),
        top_k=message.top_k,
        min_p=finite("min_p", message.min_p),
        presence_penalty=finite("presence_penalty", message.presence_penalty),
        frequency_penalty=finite("frequency_penalty", message.frequency_penalty),
        repetition_penalty=finite("repetition_penalty", message.repetition_penalty),
        logit_bias=tuple((item.token_id, finite("logit_bias", item.bias)) for item in biases),
        stop_token_ids=tuple(capped("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKENS)),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _pack_request(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        sampling=_pack_sampling(request.sampling),
        cache_salt=request.cache_salt,
    )


def _unpack_request(message: pb.Request) -> Request:
    required("sampling", message)
    return Request(
        request_id=text("request_id", message.request_id),
        prompt_ids=tuple(capped("prompt_ids", message.prompt_ids, MAX_PROMPT_TOKENS)),
        sampling=_unpack_sampling(message.sampling),
        cache_salt=text("cache_salt", message.cache_salt),
    )


def _pack_token(token: Token) -> pb.Token:
    return pb.Token(
        index=token.index,
        token_id=token.token_id,
        finish=_FINISH_TO_PB[token.finish],
        logprob=token.logprob,
        top=[pb.Logprob(token_id=item.token_id, logprob=item.logprob) for item in token.top],
    )


def _unpack_token(message: pb.Token) -> Token:
    if message.finish not in _FINISH_FROM_PB:
        raise Malformed("finish", f"{message.finish} is not a Finish")
    top = capped("top", message.top, MAX_ALTERNATIVES)
    return Token(
        index=message.index,
        token_id=message.token_id,
        finish=_FINISH_FROM_PB[message.finish],
        logprob=not_nan("logprob", message.logprob) if message.HasField("logprob") else None,
        top=tuple(Logprob(item.token_id, not_nan("logprob", item.logprob)) for item in top),
    )


def _pack_prefill_job(job: PrefillJob) -> pb.PrefillJob:
    return pb.PrefillJob(
        request=_pack_request(job.request),
        transfer_id=job.transfer_id,
        epoch=job.epoch,
        decode_address=job.decode_address,
        handoff=job.handoff,
    )


def _unpack_prefill_job(message: pb.PrefillJob) -> PrefillJob:
    required("request", message)
    return PrefillJob(
        request=_unpack_request(message.request),
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        decode_address=text("decode_address", message.decode_address),
        handoff=message.handoff,
    )


def _pack_assignment(assignment: Assignment) -> pb.Assignment:
    return pb.Assignment(
        transfer_id=assignment.transfer_id, epoch=assignment.epoch, decode_address=assignment.decode_address
    )


def _unpack_assignment(message: pb.Assignment) -> Assignment:
    return Assignment(
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        decode_address=text("decode_address", message.decode_address),
    )


def _pack_prefill_event(event: PrefillEvent) -> pb.PrefillEvent:
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
        token=_pack_token(event.token),
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
        quantize_s=event.quantize_s,
        computed_tokens=event.computed_tokens,
        prompt_logprobs=[_pack_token(token) for token in event.prompt_logprobs],
    )
    return pb.PrefillEvent(prefilled=prefilled)


def _unpack_prefilled(message: pb.Prefilled) -> Prefilled:
    required("token", message)
    prompt_logprobs = capped("prompt_logprobs", message.prompt_logprobs, MAX_PROMPT_TOKENS)
    return Prefilled(
        token=_unpack_token(message.token),
        queue_s=duration("queue_s", message.queue_s),
        prefill_s=duration("prefill_s", message.prefill_s),
        quantize_s=duration("quantize_s", message.quantize_s),
        computed_tokens=message.computed_tokens,
        prompt_logprobs=tuple(_unpack_token(token) for token in prompt_logprobs),
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


def _unpack_prefill_event(message: pb.PrefillEvent) -> PrefillEvent:
    match message.WhichOneof("body"):
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
        request=_pack_request(job.request), transfer_id=job.transfer_id, epoch=job.epoch, emitted=job.emitted
    )


def _unpack_decode_job(message: pb.DecodeJob) -> DecodeJob:
    required("request", message)
    return DecodeJob(
        request=_unpack_request(message.request),
        transfer_id=text("transfer_id", message.transfer_id),
        epoch=message.epoch,
        emitted=tuple(capped("emitted", message.emitted, MAX_PROMPT_TOKENS)),
    )


def _pack_decode_event(event: DecodeEvent) -> pb.DecodeEvent:
    if isinstance(event, Token):
        return pb.DecodeEvent(token=_pack_token(event))
    if isinstance(event, Reserved):
        return pb.DecodeEvent(reserved=pb.Reserved())
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
            return _unpack_token(message.token)
        case "reserved":
            return Reserved()
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
    )


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
    )


def _pack_lease(lease: Lease) -> pb.Lease:
    return pb.Lease(ttl_s=lease.ttl_s)


def _unpack_lease(message: pb.Lease) -> Lease:
    return Lease(duration("ttl_s", message.ttl_s))


PREFILL_JOB = Coder(pb.PrefillJob, _pack_prefill_job, _unpack_prefill_job, refuse_request)
PREFILL_EVENT = Coder(pb.PrefillEvent, _pack_prefill_event, _unpack_prefill_event)
ASSIGNMENT = Coder(pb.Assignment, _pack_assignment, _unpack_assignment, refuse_request)
DECODE_JOB = Coder(pb.DecodeJob, _pack_decode_job, _unpack_decode_job, refuse_request)
DECODE_EVENT = Coder(pb.DecodeEvent, _pack_decode_event, _unpack_decode_event)
NODE_INFO = Coder(pb.NodeInfo, _pack_node_info, _unpack_node_info)
LEASE = Coder(pb.Lease, _pack_lease, _unpack_lease)
EMPTY = Coder(pb.Empty, lambda _: pb.Empty(), lambda _: Empty())
