from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ask(_message.Message):
    __slots__ = ("call", "job", "trail")
    class TrailEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    call: int
    job: bytes
    trail: _containers.ScalarMap[str, str]
    def __init__(self, call: _Optional[int] = ..., job: _Optional[bytes] = ..., trail: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Asks(_message.Message):
    __slots__ = ("asks",)
    ASKS_FIELD_NUMBER: _ClassVar[int]
    asks: _containers.RepeatedCompositeFieldContainer[Ask]
    def __init__(self, asks: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("call", "event", "failure", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    event: bytes
    failure: Failure
    end: Empty
    def __init__(self, call: _Optional[int] = ..., event: _Optional[bytes] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., end: _Optional[_Union[Empty, _Mapping]] = ...) -> None: ...

class Answers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("seed", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "grammar")
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    seed: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: str
    def __init__(self, seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: bytes
    sampling: Sampling
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("index", "token_id", "finish", "logprob", "top")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    finish: Finish
    logprob: float
    top: Candidates
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., logprob: _Optional[float] = ..., top: _Optional[_Union[Candidates, _Mapping]] = ...) -> None: ...

class FingerprintField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("fields",)
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[FingerprintField]
    def __init__(self, fields: _Optional[_Iterable[_Union[FingerprintField, _Mapping]]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "page_tokens")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_tokens: _Optional[int] = ...) -> None: ...

class HeldKv(_message.Message):
    __slots__ = ("pages", "exact")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    pages: int
    exact: int
    def __init__(self, pages: _Optional[int] = ..., exact: _Optional[int] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("transfer_id", "epoch", "fingerprint", "num_tokens", "held")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    fingerprint: Fingerprint
    num_tokens: int
    held: HeldKv
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., num_tokens: _Optional[int] = ..., held: _Optional[_Union[HeldKv, _Mapping]] = ...) -> None: ...

class PlaneSpan(_message.Message):
    __slots__ = ("name", "raw_bytes", "coded_bytes", "checksum", "method")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    name: str
    raw_bytes: int
    coded_bytes: int
    checksum: int
    method: int
    def __init__(self, name: _Optional[str] = ..., raw_bytes: _Optional[int] = ..., coded_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., method: _Optional[int] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("transfer_id", "epoch", "seq", "layer", "layer_count", "head_start", "head_count", "page_start", "page_count", "rows", "planes", "payload")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_START_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    seq: int
    layer: int
    layer_count: int
    head_start: int
    head_count: int
    page_start: int
    page_count: int
    rows: int
    planes: _containers.RepeatedCompositeFieldContainer[PlaneSpan]
    payload: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., layer: _Optional[int] = ..., layer_count: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ..., page_start: _Optional[int] = ..., page_count: _Optional[int] = ..., rows: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[PlaneSpan, _Mapping]]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class HandoffEnd(_message.Message):
    __slots__ = ("transfer_id", "epoch", "num_frames", "first_token", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    num_frames: int
    first_token: int
    checksum: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_frames: _Optional[int] = ..., first_token: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PlaneBytes(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("transfer_id", "tokens", "bytes_by_plane", "header_bytes", "fp16_bytes", "receive_s", "wire_decode_s", "held_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_BY_PLANE_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    FP16_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    tokens: int
    bytes_by_plane: _containers.RepeatedCompositeFieldContainer[PlaneBytes]
    header_bytes: int
    fp16_bytes: int
    receive_s: float
    wire_decode_s: float
    held_tokens: int
    def __init__(self, transfer_id: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes_by_plane: _Optional[_Iterable[_Union[PlaneBytes, _Mapping]]] = ..., header_bytes: _Optional[int] = ..., fp16_bytes: _Optional[int] = ..., receive_s: _Optional[float] = ..., wire_decode_s: _Optional[float] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("frame", "pair", "number", "bytes")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    frame: KvFrame
    pair: int
    number: int
    bytes: int
    def __init__(self, frame: _Optional[_Union[KvFrame, _Mapping]] = ..., pair: _Optional[int] = ..., number: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("handoff", "frame", "end", "announced")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    handoff: Handoff
    frame: KvFrame
    end: HandoffEnd
    announced: Announced
    def __init__(self, handoff: _Optional[_Union[Handoff, _Mapping]] = ..., frame: _Optional[_Union[KvFrame, _Mapping]] = ..., end: _Optional[_Union[HandoffEnd, _Mapping]] = ..., announced: _Optional[_Union[Announced, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("accepted", "receipt", "failure")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    receipt: Receipt
    failure: Failure
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("dialect",)
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    dialect: str
    def __init__(self, dialect: _Optional[str] = ...) -> None: ...

class PairKey(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Paired(_message.Message):
    __slots__ = ("pair",)
    PAIR_FIELD_NUMBER: _ClassVar[int]
    pair: int
    def __init__(self, pair: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("number", "bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    bytes: int
    def __init__(self, number: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class PairMessage(_message.Message):
    __slots__ = ("hello", "key", "paired", "ready", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    key: PairKey
    paired: Paired
    ready: Ready
    failure: Failure
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., key: _Optional[_Union[PairKey, _Mapping]] = ..., paired: _Optional[_Union[Paired, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class PrefillJob(_message.Message):
    __slots__ = ("request", "transfer_id", "epoch", "decode_address", "handoff", "held")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    request: Request
    transfer_id: str
    epoch: int
    decode_address: str
    handoff: bool
    held: HeldKv
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., decode_address: _Optional[str] = ..., handoff: _Optional[bool] = ..., held: _Optional[_Union[HeldKv, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("transfer_id", "decode_address", "epoch", "held")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    decode_address: str
    epoch: int
    held: HeldKv
    def __init__(self, transfer_id: _Optional[str] = ..., decode_address: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[_Union[HeldKv, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("own", "top_ids", "top")
    OWN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    own: bytes
    top_ids: bytes
    top: bytes
    def __init__(self, own: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("token", "queue_s", "prefill_s", "quantize_s", "computed_tokens", "prompt_logprobs", "wire_encode_s", "fetched_tokens", "fetched_bytes", "fetch_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WIRE_ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    token: Token
    queue_s: float
    prefill_s: float
    quantize_s: float
    computed_tokens: int
    prompt_logprobs: PromptLogprobs
    wire_encode_s: float
    fetched_tokens: int
    fetched_bytes: int
    fetch_s: float
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., quantize_s: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., wire_encode_s: _Optional[float] = ..., fetched_tokens: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_s: _Optional[float] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("receipt", "swap_wait_s", "transfer_s", "overlapped_bytes", "epoch")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    SWAP_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    OVERLAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    receipt: Receipt
    swap_wait_s: float
    transfer_s: float
    overlapped_bytes: int
    epoch: int
    def __init__(self, receipt: _Optional[_Union[Receipt, _Mapping]] = ..., swap_wait_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., overlapped_bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class HandoffFailed(_message.Message):
    __slots__ = ("epoch", "code", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    code: str
    message: str
    def __init__(self, epoch: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("prefilled", "handed_off", "handoff_failed", "prompt_logprobs")
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prefilled: Prefilled
    handed_off: HandedOff
    handoff_failed: HandoffFailed
    prompt_logprobs: PromptLogprobs
    def __init__(self, prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., handoff_failed: _Optional[_Union[HandoffFailed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class DecodeJob(_message.Message):
    __slots__ = ("request", "transfer_id", "epoch", "emitted")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    request: Request
    transfer_id: str
    epoch: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: HeldKv
    def __init__(self, held: _Optional[_Union[HeldKv, _Mapping]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: Receipt
    def __init__(self, receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Swapped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Decoded(_message.Message):
    __slots__ = ("queue_s", "decode_s", "attend_s", "approximation_s", "swapped_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEND_S_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATION_S_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    decode_s: float
    attend_s: float
    approximation_s: float
    swapped_s: float
    def __init__(self, queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., attend_s: _Optional[float] = ..., approximation_s: _Optional[float] = ..., swapped_s: _Optional[float] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "landed", "token", "decoded", "swapped")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    landed: Landed
    token: Token
    decoded: Decoded
    swapped: Swapped
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., decoded: _Optional[_Union[Decoded, _Mapping]] = ..., swapped: _Optional[_Union[Swapped, _Mapping]] = ...) -> None: ...

class Stat(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class WireAddress(_message.Message):
    __slots__ = ("wire", "address")
    WIRE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    wire: str
    address: str
    def __init__(self, wire: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class CodecLoss(_message.Message):
    __slots__ = ("kl", "top1", "perplexity_ratio", "tokens")
    KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kl: float
    top1: float
    perplexity_ratio: float
    tokens: int
    def __init__(self, kl: _Optional[float] = ..., top1: _Optional[float] = ..., perplexity_ratio: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "role", "address", "incarnation", "model", "fingerprint", "page_tokens", "max_context", "total_pages", "free_pages", "queued_tokens", "running", "waiting", "stats", "draining", "kernels", "wires", "loss", "marks", "control_version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    WIRES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: Role
    address: str
    incarnation: str
    model: str
    fingerprint: Fingerprint
    page_tokens: int
    max_context: int
    total_pages: int
    free_pages: int
    queued_tokens: int
    running: int
    waiting: int
    stats: _containers.RepeatedCompositeFieldContainer[Stat]
    draining: bool
    kernels: str
    wires: _containers.RepeatedCompositeFieldContainer[WireAddress]
    loss: CodecLoss
    marks: bytes
    control_version: int
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., page_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., stats: _Optional[_Iterable[_Union[Stat, _Mapping]]] = ..., draining: _Optional[bool] = ..., kernels: _Optional[str] = ..., wires: _Optional[_Iterable[_Union[WireAddress, _Mapping]]] = ..., loss: _Optional[_Union[CodecLoss, _Mapping]] = ..., marks: _Optional[bytes] = ..., control_version: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    def __init__(self, ttl_s: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "retry_after_s", "param", "reason", "span")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_s: float
    param: str
    reason: str
    span: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., param: _Optional[str] = ..., reason: _Optional[str] = ..., span: _Optional[int] = ...) -> None: ...
