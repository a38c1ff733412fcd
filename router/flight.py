"""What the router knows of one sequence while it is on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hackkv.errors import NodeLost, TransferError
from hackkv.timing import StageClock
from hackkv.types import Prefilled, Receipt, Request, Token
from router.lifecycle import Lifecycle
from router.policy import Need


@dataclass(slots=True)
class Flight:
    """One sequence: its request, its clock, the tokens the client has, and where it was served.

    `emit` takes each token once, in order; it returns False when the client wants no more.
    """

    request: Request
    clock: StageClock
    emit: Callable[[Token], bool]
    token_ids: list[int] = field(default_factory=list)
    token_at_s: list[float] = field(default_factory=list)
    """When each token was handed to the client, in seconds since arrival."""
    dispatched_s: float | None = None
    """When the first attempt left for a prefill node, in seconds since arrival."""
    life: Lifecycle = field(default_factory=Lifecycle)
    turn: int = 0
    """Place in the order of arrival; whoever waits keeps it through every failure."""
    attempts: int = 1
    """How often the request was placed on nodes: once more for each that was lost, was full or let go of it."""
    prefill_node: str = ""
    decode_node: str = ""
    prefilled: Prefilled | None = None
    receipts: list[Receipt] = field(default_factory=list)
    """One for each handoff that landed: more than one if a decode node died."""
    complete: bool = False
    """The client has all of it, or wants no more: what fails from here on is not the client's problem."""
    diverged: int = 0
    """Replayed tokens that differ from those the client already has."""
    replayed: int = 0
    """Tokens that the client had already and a decode node computed again, to go on after them."""
    strays: Counter[str] = field(default_factory=Counter)
    """Events of nodes that came twice, too late or out of turn, by name; they change nothing."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV the prefill node had already."""
        return len(self.request.prompt_ids) - self.prefilled.computed_tokens if self.prefilled else 0

    @property
    def recovering(self) -> bool:
        """It was placed before: whoever was let in is not turned away."""
        return self.attempts > 1

    @property
    def need(self) -> Need:
        """Room that a decode node must have for it now."""
        prompt = len(self.request.prompt_ids)
        return Need(prompt + len(self.token_ids), prompt + self.request.sampling.max_tokens)

    def deliver(self, token: Token) -> bool:
        """Hand a token on, unless the client has it from an earlier attempt. False: the client wants no more.

        Raises `NodeLost` if tokens are missing in between, and `TransferError` if a replay ends too early.
        """
        sent = len(self.token_ids)
        if token.index < sent:
            self.diverged += token.token_id != self.token_ids[token.index]
            if token.finish is not None:
                raise TransferError(f"the replay ended at token {token.index}; {sent} tokens were sent before")
            return True
        if token.index > sent:
            raise NodeLost(f"expected token {sent}, got token {token.index}")
        self.token_ids.append(token.token_id)
        self.token_at_s.append(self.clock.total_s)
        wanted = self.emit(token)
        self.complete = token.finish is not None or not wanted
        return wanted
