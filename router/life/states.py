"""The life of a request, as one table: every state, who owns it, how long it may last, and what may follow.

The router moves each request through it (`router.life.lifecycle`), arms the deadline that the table names, and books
time to the stage that the table names. `python -m router.life.states` prints the table and its drawing, as
docs/request.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hackkv.timing import Stage


class RequestState(StrEnum):
    """A state in the life of a request."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING = "waiting for room"
    OFFERED = "offered"
    TRANSFERRING = "transferring"
    LANDED = "landed"
    DECODING = "decoding"
    SWAPPED = "swapped"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    meaning: str
    owner: str
    """The owner of what the request needs in this state. It gives that back when the state ends."""
    deadline: str | None
    """Field of `DeadlinesConfig`; None in a final state."""
    stage: Stage
    """The stage for time that no worker accounts for."""
    next: frozenset[RequestState]
    """States that may follow. A state may also follow itself, which renews its deadline."""
    retried: bool = False
    """Whether another decode node is tried when the deadline passes. If not, the request fails with a 504."""


_S = RequestState
_RECOVERS = frozenset({_S.QUEUED, _S.WAITING})
"""After a node was lost: on to another decode node if the prefill node kept the KV, else back to the queue."""


def _row(
    meaning: str, owner: str, deadline: str, stage: Stage, *following: RequestState, retried: bool = False
) -> Rule:
    return Rule(meaning, owner, deadline, stage, frozenset({_S.FAILED, *following}), retried)


TABLE: dict[RequestState, Rule] = {
    _S.QUEUED: _row("waits for a prefill node", "router", "queue_s", Stage.ROUTER_QUEUE, _S.PREFILLING),
    _S.PREFILLING: _row(
        "the prompt is computed; sealed pages leave if a decode node has room",
        "prefill node", "prefill_s", Stage.PREFILL,
        _S.QUEUED, _S.WAITING, _S.OFFERED, _S.TRANSFERRING, _S.LANDED, _S.STREAMING,
    ),
    _S.WAITING: _row(
        "KV waits in the prefill node's host memory until a decode node has room",
        "prefill node", "queue_s", Stage.SWAP_WAIT, _S.QUEUED, _S.OFFERED,
    ),
    _S.OFFERED: _row(
        "a decode node holds room, the prefill node is told",
        "decode node", "offer_s", Stage.TRANSFER, *_RECOVERS, _S.TRANSFERRING,
    ),
    _S.TRANSFERRING: _row(
        "KV is on its way into pages that no one can see yet",
        "prefill node", "transfer_s", Stage.TRANSFER, *_RECOVERS, _S.LANDED, retried=True,
    ),
    _S.LANDED: _row(
        "KV is verified; waits for a place in the batch, replays what the client has",
        "decode node", "landed_s", Stage.DECODE_QUEUE, *_RECOVERS, _S.DECODING, _S.SWAPPED, _S.STREAMING, retried=True,
    ),
    _S.DECODING: _row(
        "tokens come", "decode node", "token_s", Stage.DECODE, *_RECOVERS, _S.SWAPPED, _S.STREAMING, retried=True
    ),
    _S.SWAPPED: _row(
        "lies in the decode node's host memory until pages are free",
        "decode node", "swapped_s", Stage.SWAP_WAIT, *_RECOVERS, _S.DECODING, _S.STREAMING, retried=True,
    ),
    _S.STREAMING: _row(
        "every token is there; the nodes' accounts follow", "router", "token_s", Stage.STREAM, _S.DONE
    ),
    _S.DONE: Rule("the client has all it wants", "client", None, Stage.STREAM, frozenset()),
    _S.FAILED: Rule("the client was told why", "client", None, Stage.STREAM, frozenset()),
}  # fmt: skip


def allowed(now: RequestState, to: RequestState) -> bool:
    """Whether `to` may follow `now`."""
    return to == now or to in TABLE[now].next


def drawing() -> str:
    """The table as a Mermaid diagram. Every state may also fail, which is not drawn."""
    lines = ["stateDiagram-v2", "    direction LR", "    [*] --> queued"]
    for state, rule in TABLE.items():
        name = _identifier(state)
        if name != state:
            lines.append(f"    {name}: {state}")
        lines += [f"    {name} --> {_identifier(to)}" for to in RequestState if to in rule.next and to is not _S.FAILED]
    return "\n".join((*lines, "    done --> [*]"))


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| state | what happens | owner | deadline, and then | stage | may go on to |",
        "|---|---|---|---|---|---|",
    ]
    for state, rule in TABLE.items():
        following = ", ".join(to for to in RequestState if to in rule.next) or "-"
        deadline = f"`{rule.deadline}`, {'another node' if rule.retried else '504'}" if rule.deadline else "-"
        lines.append(f"| {state} | {rule.meaning} | {rule.owner} | {deadline} | `{rule.stage}` | {following} |")
    return "\n".join(lines)


def _identifier(state: RequestState) -> str:
    return state.replace(" ", "_")


if __name__ == "__main__":
    print(f"```mermaid\n{drawing()}\n```\n\n{table()}")
