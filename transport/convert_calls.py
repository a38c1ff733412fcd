"""Messages of a stream of calls (`Serve`) <-> protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hackkv.errors import HackkvError
from transport.coder import Malformed, MessageCoder, capped, text
from transport.convert_failure import pack_failure, unpack_failure
from transport.pb import kv_pb2 as pb

MAX_TOGETHER: Final = 1 << 16
"""The most asks or answers of one message."""
MAX_TRAIL: Final = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """Begins the call number `call`. An ask without a job ends that call: its caller has left."""

    call: int
    job: bytes | None = None
    trail: Mapping[str, str] = field(default_factory=dict)


class Answer(NamedTuple):
    """An event of a call, the error with which it failed, or None: its end."""

    call: int
    body: bytes | HackkvError | None


def _pack_asks(asks: list[Ask]) -> pb.Asks:
    return pb.Asks(asks=[pb.Ask(call=ask.call, job=ask.job, trail=ask.trail) for ask in asks])


def _unpack_asks(message: pb.Asks) -> list[Ask]:
    return [
        Ask(ask.call, ask.job if ask.HasField("job") else None, _unpack_trail(ask))
        for ask in capped("asks", message.asks, MAX_TOGETHER)
    ]


def _unpack_trail(ask: pb.Ask) -> dict[str, str]:
    trail = capped("trail", ask.trail, MAX_TRAIL)
    return {text("trail", key): text("trail", value) for key, value in trail.items()}


def _pack_answer(answer: Answer) -> pb.Answer:
    match answer.body:
        case bytes(event):
            return pb.Answer(call=answer.call, event=event)
        case None:
            return pb.Answer(call=answer.call, end=pb.Empty())
    return pb.Answer(call=answer.call, failure=pack_failure(answer.body))


def _unpack_answer(answer: pb.Answer) -> Answer:
    match answer.WhichOneof("body"):
        case "event":
            return Answer(answer.call, answer.event)
        case "failure":
            return Answer(answer.call, unpack_failure(answer.failure))
        case "end":
            return Answer(answer.call, None)
    raise Malformed("body", "no member of the oneof is set")


def _pack_answers(answers: list[Answer]) -> pb.Answers:
    return pb.Answers(answers=map(_pack_answer, answers))


def _unpack_answers(message: pb.Answers) -> list[Answer]:
    return [_unpack_answer(answer) for answer in capped("answers", message.answers, MAX_TOGETHER)]


ASKS = MessageCoder(pb.Asks, _pack_asks, _unpack_asks)
ANSWERS = MessageCoder(pb.Answers, _pack_answers, _unpack_answers)
