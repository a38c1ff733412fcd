"""One sequence on its way, as the router knows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from hackkv.errors import NodeLost, TransferError
from hackkv.timing import StageClock
from hackkv.types import Prefilled, Receipt, Request, Token
from router.fleet.holdings import Marks
from router.fleet.order import Demand
from router.fleet.policy import Need
from router.life.lifecycle import Lifecycle
from transport.trail import NoSpan, TraceSpan


class Output:
    """The output of a sequence that the client has."""

    def __init__(self, emit: Callable[[Token], bool], clock: StageClock) -> None:
        """`emit` takes each token once, in order; it returns False when the client wants no more."""
        self._emit, self._clock = emit, clock
        self.token_ids: list[int] = []
        self.at_s: list[float] = []
        """When each token was handed to the client, in seconds since arrival."""
        self.complete = False
        """Whether the client has every token, or wants no more. Later failures do not concern it then."""
        self.diverged = 0
        """Replayed tokens that differ from those the client already has."""

    def deliver(self, token: Token) -> None:
        """Hand a token on, unless the client has it from an earlier attempt.

        Raises `NodeLost` if tokens are missing in between, and `TransferError` if a replay ends too early.
        """
        sent = len(self.token_ids)
        if token.index < sent:
            self.diverged += token.token_id != self.token_ids[token.index]
            if token.finish is not None:
                raise TransferError(f"the replay ended at token {token.index}; {sent} tokens were sent before")
            return
        if token.index > sent:
            raise NodeLost(f"expected token {sent}, got token {token.index}")
        self.token_ids.append(token.token_id)
        self.at_s.append(self._clock.total_s)
        wanted = self._emit(token)
        self.complete = token.finish is not None or not wanted


@dataclass(slots=True)
class Route:
    """The nodes that served a sequence, and what they said of it."""

    attempts: int = 1
    """Times that the request was placed on nodes: once more for each node that was lost, was full or dropped it."""
    prefill_node: str = ""
    decode_node: str = ""
    prefilled: Prefilled | None = None
    receipts: list[Receipt] = field(default_factory=list)
    """One for each handoff that landed: more than one if a decode node died."""
    replayed: int = 0
    """Tokens that the client had already and that a decode node computed again."""
    strays: Counter[str] = field(default_factory=Counter)
    """Events of nodes that came twice, too late or out of order, by name; they change nothing."""


class Flight:
    """One sequence: its request, its clock, the state it is in, what the client has, and where it was served."""

    def __init__(self, request: Request, clock: StageClock, emit: Callable[[Token], bool]) -> None:
        """See `Output` for `emit`."""
        self.request, self.clock = request, clock
        self.life = Lifecycle()
        self.span: TraceSpan = NoSpan()
        self.output = Output(emit, clock)
        self.route = Route()
        self.marks: Marks = ()
        """Marks of the prompt's first pages, which nodes may hold."""
        self.serial = 0
        """Place in the order of arrival; the request keeps it through every failure."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV the prefill node had already."""
        prefilled = self.route.prefilled
        return len(self.request.prompt_ids) - prefilled.computed_tokens if prefilled else 0

    @property
    def fetched_tokens(self) -> int:
        """The number of its cached tokens that came from a decode node."""
        return self.route.prefilled.fetched_tokens if self.route.prefilled else 0

    @property
    def held_tokens(self) -> int:
        """Prompt tokens whose KV the last decode node that got it had already."""
        return self.route.receipts[-1].held_tokens if self.route.receipts else 0

    @property
    def need(self) -> Need:
        """Room that a decode node must have for the request now."""
        prompt = len(self.request.prompt_ids)
        return Need(prompt + len(self.output.token_ids), prompt + self.request.sampling.max_tokens)

    def prefill_demand(self, avoid: AbstractSet[str]) -> Demand:
        """The share of a prefill node that the request needs."""
        prompt = len(self.request.prompt_ids)
        return Demand(Need(prompt, prompt), self.serial, frozenset(avoid), self.marks)

    def decode_demand(self, avoid: AbstractSet[str]) -> Demand:
        """The share of a decode node that the request needs."""
        return Demand(self.need, self.serial, frozenset(avoid), self.marks, recovering=self.route.attempts > 1)
