"""Messages of a pair (a `KvReceiver.Connect` stream) <-> protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hackkv.errors import HackkvError
from transport.coder import Malformed, MessageCoder, parcel_size, text
from transport.convert_failure import pack_failure, unpack_failure
from transport.pb import kv_pb2 as pb

MAX_KEY_BYTES: Final = 64 << 10
"""The most bytes of a value. Addresses and unique ids take hundreds, the metadata of registered memory thousands."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialect of the sender's link (`LinkKind.dialect`)."""

    dialect: str


@dataclass(frozen=True, slots=True)
class PairKey:
    """A value that one end tells the other while both connect (`Exchange.put`)."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Paired:
    """The receiver's end is connected and knows the pair by the number `pair`."""

    pair: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The receiver has room for parcel `number`, of `size` bytes. The sender must send as many bytes, even if the
    handoff is over."""

    number: int
    size: int


PairMessage = Hello | PairKey | Paired | Ready | HackkvError


def _pack(noun: PairMessage) -> pb.PairMessage:
    match noun:
        case Hello(dialect):
            return pb.PairMessage(hello=pb.Hello(dialect=dialect))
        case PairKey(name, value):
            return pb.PairMessage(key=pb.PairKey(name=name, value=value))
        case Paired(pair):
            return pb.PairMessage(paired=pb.Paired(pair=pair))
        case Ready(number, size):
            return pb.PairMessage(ready=pb.Ready(number=number, bytes=size))
    return pb.PairMessage(failure=pack_failure(noun))


def _unpack(message: pb.PairMessage) -> PairMessage:
    match message.WhichOneof("body"):
        case "hello":
            return Hello(text("dialect", message.hello.dialect))
        case "key":
            if len(message.key.value) > MAX_KEY_BYTES:
                raise Malformed("value", f"{len(message.key.value)} bytes, at most {MAX_KEY_BYTES} are accepted")
            return PairKey(text("name", message.key.name), message.key.value)
        case "paired":
            return Paired(message.paired.pair)
        case "ready":
            return Ready(message.ready.number, parcel_size(message.ready.bytes))
        case "failure":
            return unpack_failure(message.failure)
    raise Malformed("body", "no member of the oneof is set")


PAIR_MESSAGE = MessageCoder(pb.PairMessage, _pack, _unpack)
