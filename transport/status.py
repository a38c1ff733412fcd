"""Errors at the gRPC seam: `HackkvError` -> status and trailing metadata at the server, and back at the client.

A failure travels whole in the trailing metadata (`FAILURE_KEY`). The gRPC status code beside it is for proxies, logs
and grpcurl. A call that ends without that metadata failed on the way and not in a service. Its status code then decides
the error: for example `NodeLost`, `DeadlineExceeded` or `FrameRefused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable, Iterator
from typing import NoReturn, TypeVar, cast

import grpc
import grpc.aio

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, NodeLost, Unavailable
from transport.convert_failure import decode_failure, encode_failure

T = TypeVar("T")

log = logging.getLogger(__name__)

FAILURE_KEY = "hackkv-failure-bin"
_DETAIL_CHARS = 256
_WRITE_FAILED = "Internal error from Core"
"""grpc.aio reports this to a client whose write failed, in place of the reason."""

Context = grpc.aio.ServicerContext[bytes, bytes]

_STATUS = {
    "request": grpc.StatusCode.INVALID_ARGUMENT,
    "config": grpc.StatusCode.FAILED_PRECONDITION,
    "checkpoint": grpc.StatusCode.FAILED_PRECONDITION,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "node_lost": grpc.StatusCode.UNAVAILABLE,
    "node_draining": grpc.StatusCode.UNAVAILABLE,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    # Never CANCELLED: grpc.aio raises asyncio.CancelledError at a client that gets that status from its peer.
    "cancelled": grpc.StatusCode.ABORTED,
    "handshake_refused": grpc.StatusCode.FAILED_PRECONDITION,
    "frame_refused": grpc.StatusCode.DATA_LOSS,
    "transfer": grpc.StatusCode.ABORTED,
}


def internal(error: BaseException, where: str) -> HackkvError:
    """Log an unexpected exception with its traceback. Returns an error for the peer that names only its type."""
    log.error("%s raised an unexpected %s", where, type(error).__name__, exc_info=error)
    return HackkvError(f"{where}: unexpected {type(error).__name__}, see the log of the node")


async def answer(context: Context, data: bytes) -> None:
    """Write one message to the caller. Raises `NodeLost` if the caller is gone."""
    try:
        await context.write(data)
    except grpc.aio.InternalError as exc:  # a write that was under way when the call ended
        raise NodeLost("the caller went away") from exc


async def write_message(call: grpc.aio.StreamStreamCall[bytes, bytes], data: bytes) -> bool:
    """Write one message to the peer of a call; False if the call is over."""
    try:
        await call.write(data)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        return False
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        return False
    return True


async def read_message(context: Context) -> bytes:
    """The caller's next message. Raises `NodeLost` when the caller has gone or sends no more."""
    try:
        data = await context.read()
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise NodeLost("the sender went away") from None
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise NodeLost("the sender ended the stream too early")
    return data


async def outstay(context: Context, within_s: float) -> None:
    """After the last message of a stream, wait until the caller ends the call.

    A verdict in the call's status could overtake a message that the caller is writing. grpc.aio would then report the
    failed write and hide the status. So verdicts are messages, and the caller ends the call.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while isinstance(await context.read(), bytes):
                pass


async def abort(context: Context, error: HackkvError) -> NoReturn:
    """End a call with `error`; the client raises the same class with the same message."""
    details = str(error).encode("ascii", "replace").decode()[:_DETAIL_CHARS]
    status = _STATUS.get(error.code, grpc.StatusCode.INTERNAL)
    await context.abort(status, details, ((FAILURE_KEY, encode_failure(error)),))


async def reporting(context: Context, method: str, work: Awaitable[T]) -> T:
    """Outermost boundary of a service method: an error ends the call with that error, and the server goes on."""
    try:
        return await work
    except HackkvError as error:
        await abort(context, error)
    except Exception as error:  # noqa: BLE001 - logged there, and reported to the caller as `internal`
        await abort(context, internal(error, method))


def cancelled_from_outside() -> bool:
    """Tell a cancelled task from a call that ended: grpc.aio raises `asyncio.CancelledError` for both."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def translating(address: str) -> Iterator[None]:
    """Turn errors of grpc.aio at a client into errors of this project that name the peer."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        raise rebuild(exc, address) from exc
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise NodeLost(f"{address}: the connection was closed") from None
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as exc:
        raise NodeLost(f"{address}: the connection was closed") from exc


def rebuild(exc: grpc.aio.AioRpcError, address: str) -> HackkvError:
    """The error that the peer raised; without one, an error that says how the call was lost."""
    trailing = cast(Iterable[tuple[str, str | bytes]], exc.trailing_metadata() or ())  # the stub misses `__iter__`
    for key, value in trailing:
        if key == FAILURE_KEY and isinstance(value, bytes):
            return decode_failure(value)
    details = exc.details()
    match exc.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return NodeLost(f"{address}: {details}")
        case grpc.StatusCode.INTERNAL if details == _WRITE_FAILED:
            return NodeLost(f"{address}: the connection was lost while writing")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{address} did not answer in time")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return FrameRefused(f"{address}: {details}", reason="oversized")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(f"{address} does not serve this role: {details}")
    return HackkvError(f"{address}: {exc.code().name}: {details}")
