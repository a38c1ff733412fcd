"""Frozen nouns that cross rooms. No torch here: the router and the wires move these without loading a tensor library.

Words are the design's: a *page* is `page_tokens` consecutive tokens of one layer and KV head; the *open page* is the
last, unfilled one; a *handoff* is the KV of one request on its way from prefill to decode; a *frame* is one message
of a handoff. Durations are seconds on the monotonic clock of one process; timestamps never cross a process.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, SupportsBytes

from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.logprobs import PromptLogprobs


class Role(StrEnum):
    """The part that a node plays."""

    PREFILL = "prefill"
    DECODE = "decode"


class Finish(StrEnum):
    """Why a sequence ended; the values are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"


MAX_GRAMMAR_CHARS = 128 << 10
"""The longest grammar that a request may bring along."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules for choosing tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` is always set (the router draws one if the client gave none), so that a replay on another node chooses the
    same tokens: the draw for token i depends on (seed, i) only. `logprobs` is the number of alternatives to report
    beside the chosen token, None for no log-probabilities at all.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    """The grammar of the output (`hackkv.guide`); empty allows everything. With a grammar, end tokens always end."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: a prompt already tokenized, and how to sample from it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    cache_salt: str = ""
    """Only requests of equal salt may share sealed pages of a common prefix: one tenant cannot time another's."""


class Logprob(NamedTuple):
    """Natural-log probability of one candidate token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """Token number `index` of the output; index 0 was chosen by the prefill node, the rest by the decode node."""

    index: int
    token_id: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


WIRE_FORM = "codec.wire_form"
"""The field of a fingerprint that names how its node codes planes on the wire."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Facts that both ends of a handoff must know of each other, as named fields. Order does not matter.

    All fields say how KV rests and must be equal, but for `WIRE_FORM`: that is how KV travels, which the sender
    chooses. The receiver only has to know the form, since pages rest as they were before they were coded.
    """

    fields: tuple[tuple[str, str], ...]

    @property
    def wire_form(self) -> str:
        """The form in which a sender of this fingerprint codes planes."""
        return dict(self.fields).get(WIRE_FORM, "")

    def mismatch(self, other: Fingerprint, here: str = "here", there: str = "at the peer") -> str | None:
        """Name the first field that has to be equal and is not, with both values and whose they are; else None."""
        mine, theirs = dict(self.fields), dict(other.fields)
        for name in sorted((mine.keys() | theirs.keys()) - {WIRE_FORM}):
            if mine.get(name) != theirs.get(name):
                return f"{name}: {mine.get(name, 'absent')!r} {here}, {theirs.get(name, 'absent')!r} {there}"
        return None


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of a model's KV, in whatever form it is kept."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a model's KV cache: what one page is, and how many layers and KV heads have one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the open one included."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class Handoff:
    """Opens a transfer. `transfer_id` is issued by the router and unique per attempt; `epoch` is that attempt."""

    transfer_id: str
    epoch: int
    fingerprint: Fingerprint
    num_tokens: int
    held: HeldKv = NOTHING_HELD
    """KV that the receiver has already."""


@dataclass(frozen=True, slots=True)
class PlaneSpan:
    """One plane inside a frame's payload. The checksum is XXH3-64 of the coded bytes, seeded with the frame's header
    (`hackkv.framing`): it also says that the bytes are in their place."""

    name: str
    raw_bytes: int
    coded_bytes: int
    checksum: int
    method: int = 0
    """The coding of the bytes: 0 for none, else the number of a `hackkv.wire_form.WireForm`."""


class Payload(Sized, SupportsBytes, Protocol):
    """The bytes that a frame carries: `len()` is their number, `bytes()` brings them to host memory. A wire that can
    move data from where it lies need not call it. A `bytes` object is itself a payload in host memory: no copy."""


@dataclass(frozen=True, slots=True)
class KvFrame:
    """Pages [page_start, page_start + page_count) of KV heads [head_start, head_start + head_count) of `layers`.

    `seq` counts the frames of a handoff from 0. The payload is the planes one after another, in the order of `planes`:
    layer by layer, and layers may differ in planes. Each plane is laid out [heads][pages][plane shape], so any split
    by head can cut it. `rows` is 0 for sealed pages; for the open page it is the number of FP16 rows (page_count is
    then 1, plane shape [rows, head_dim]).
    """

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
    planes: tuple[PlaneSpan, ...]
    payload: Payload = field(repr=False)
    header_bytes: int = field(default=0, compare=False)
    """Bytes of the received message beside the payload. The receiving wire sets it; it is not sent."""

    @property
    def layers(self) -> range:
        """The layers whose pages are in the frame."""
        return range(self.layer, self.layer + self.layer_count)


@dataclass(frozen=True, slots=True)
class HandoffEnd:
    """Closes a transfer: the number of frames, the token that prefill chose, and XXH3-64 of the other fields."""

    transfer_id: str
    epoch: int
    num_frames: int
    first_token: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receiver's word that a handoff was verified and committed."""

    transfer_id: str
    tokens: int
    bytes_by_plane: tuple[tuple[str, int], ...]
    """Bytes as received: coded."""
    header_bytes: int
    fp16_bytes: int
    """Bytes in FP16 of the rows that travelled: 2 bytes x K and V x layers x KV heads x head_dim x rows."""
    receive_s: float
    wire_decode_s: float = 0.0
    """Turning frames into pages: checksums, decoding, copying to where they rest. It overlaps with receiving."""
    held_tokens: int = 0
    """The number of `tokens` in pages that the receiver held already."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Asks a prefill node to run a prompt and to hand its KV to `decode_address` (`WireAddress.url`).

    An empty `decode_address` with `handoff` True means that no decode node has room yet: the KV waits in the node's
    outbox until `assign` names one. `handoff` False is for requests that end with their first token.
    """

    request: Request
    transfer_id: str
    epoch: int
    decode_address: str = ""
    handoff: bool = True
    held: HeldKv = NOTHING_HELD
    """`Reserved.held` of the decode node at `decode_address`."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed and token 0 chosen. `quantize_s` and `wire_encode_s` lie within `prefill_s`, `fetch_s`
    within `queue_s`."""

    token: Token
    queue_s: float
    prefill_s: float
    quantize_s: float
    computed_tokens: int
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    """Empty unless the request asks for them."""
    wire_encode_s: float = 0.0
    """Turning sealed pages into frames: coding, checksums."""
    fetched_tokens: int = 0
    """Tokens not computed because their pages came from the decode node, as `fetched_bytes` in `fetch_s`."""
    fetched_bytes: int = 0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The decode node committed the KV of this epoch; the prefill node keeps a copy for as long as it has room.

    Both durations count from token 0 on, so they exclude what overlapped with prefill; those of a later epoch count
    from the `assign` that asked for it.
    """

    receipt: Receipt
    swap_wait_s: float
    transfer_s: float
    overlapped_bytes: int
    """Payload bytes that had left before token 0 was chosen."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """A push did not reach its decode node. The prefill node still has the KV: `assign` may name any decode node again.

    `code` and `message` are those of the error (`hackkv.errors.by_code`).
    """

    epoch: int
    code: str
    message: str


PrefillEvent = Prefilled | HandedOff | HandoffFailed


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Asks a decode node to reserve room for a request and to go on with it once its KV has landed.

    `emitted` are the tokens that the client has already, from an earlier epoch: the node runs them through its model
    once their prompt has landed, sends none of them again, and goes on with the token after them. Where the handoff's
    first token is not `emitted[0]`, the replay has diverged and the job fails with `TransferError`.
    """

    request: Request
    transfer_id: str
    epoch: int
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """The decode node holds pages for the prompt and the step after it; the handoff may start."""

    held: HeldKv = NOTHING_HELD
    """KV that it has from earlier requests, and keeps until the request is over."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The KV was verified and committed; the request waits for its first step."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Swapped:
    """The sequence was moved to the decode node's host memory; the next token means that it is back."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The last token was sent. `attend_s` and `approximation_s` lie within `decode_s`; `swapped_s`, the time that the
    sequence lay in host memory, does not."""

    queue_s: float
    decode_s: float
    attend_s: float
    approximation_s: float
    swapped_s: float = 0.0


DecodeEvent = Reserved | Landed | Token | Swapped | Decoded
