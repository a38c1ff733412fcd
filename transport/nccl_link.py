"""Links over NCCL, for payloads between GPUs: by `nccl4py`'s bindings, in communicators of two that never block.

A sender has payloads in host memory. It stages each on the device (`CudaMemory`), on a stream of the link's own. At the
receiver payloads stay on the device, and the checksums of their planes are computed there (`DevicePayload`). NCCL may
take only two multiprocessors, since kernels that wait for a peer occupy theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hackkv.device_payload import DevicePayload
from hackkv.errors import ConfigError, DeadlineExceeded, NodeLost
from hackkv.types import Payload
from transport.link import CONNECT_TIMEOUT_S, PARCEL_TIMEOUT_S, Checksums, Exchange, LinkKind

RECEIVER: Final = 1
MAX_CTAS: Final = 2
OLDEST: Final = 21800
"""The first version in which a communicator can be told its number of multiprocessors, and not to block."""
WARM_BYTES: Final = 4096
"""Size of a parcel whose check runs every kernel that checks of parcels compile."""
POLL_S: Final = 100e-6
SUCCESS, IN_PROGRESS, UINT8 = 0, 7, 1  # ncclResult_t and ncclDataType_t


class PayloadMemory(Protocol):
    """The memory from which and into which NCCL moves payloads. Buffers are uint8 [bytes]."""

    @property
    def stream(self) -> int:
        """The CUDA stream of all copies and transfers."""
        ...

    def use(self) -> None:
        """Prepare the calling thread to use this memory."""
        ...

    def stage(self, payload: Payload) -> Tensor:
        """Copy a payload into this memory."""
        ...

    def room(self, size: int) -> Tensor:
        """Memory for a payload."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Return a function that says whether all work that is on the stream now is done."""
        ...

    def payload(self, buffer: Tensor) -> DevicePayload:
        """The payload that has arrived in `buffer`."""
        ...


class CudaMemory:
    """Memory of the GPU on which the node computes."""

    def __init__(self, xxh3_64: Checksums) -> None:
        """`xxh3_64` computes checksums on the GPU; see `DevicePayload`."""
        self._xxh3_64 = xxh3_64
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)

    @property
    def stream(self) -> int:
        """See `PayloadMemory`."""
        return int(self._stream.cuda_stream)

    def use(self) -> None:
        """See `PayloadMemory`."""
        torch.cuda.set_device(self._device)

    def stage(self, payload: Payload) -> Tensor:
        """See `PayloadMemory`."""
        host = torch.frombuffer(bytearray(bytes(payload)), dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True)

    def room(self, size: int) -> Tensor:
        """See `PayloadMemory`."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def mark(self) -> Callable[[], bool]:
        """See `PayloadMemory`."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def payload(self, buffer: Tensor) -> DevicePayload:
        """See `PayloadMemory`."""
        return DevicePayload(buffer, self._xxh3_64, lambda: torch.cuda.stream(self._stream))


def create(xxh3_64: Checksums) -> LinkKind:
    """The kind `nccl` of `LINKS`. Raises `ConfigError` that names what is missing: bindings, library or GPU."""
    bindings = load_bindings()
    if not torch.cuda.is_available():
        raise ConfigError("wire: nccl: torch sees no CUDA device (a torch build without CUDA, or no driver)")
    return nccl_kind(bindings, partial(CudaMemory, xxh3_64))


def load_bindings() -> Any:
    """The bindings, which have loaded the library. Raises `ConfigError`, which names both versions if they disagree."""
    try:
        bindings = importlib.import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise ConfigError(f"wire: nccl: {error}: pip install 'hackkv[nccl]'") from error
    try:
        version = int(bindings.get_version())
    except Exception as error:
        raise ConfigError(f"wire: nccl: libnccl.so.2 cannot be loaded: {str(error).splitlines()[0]}") from error
    if version < OLDEST or version // 10_000 != bindings.__version_code__ // 10_000:
        raise ConfigError(f"wire: nccl: the library is {_dotted(version)}, nccl4py is for {bindings.__version__}")
    return bindings


def nccl_kind(bindings: Any, memory: Callable[[], PayloadMemory]) -> LinkKind:
    """The kind of link over these bindings. Both ends need the same major and minor version of NCCL."""
    version = _dotted(int(bindings.get_version()))
    dialect = f"nccl {version.rpartition('.')[0]}"
    return LinkKind("nccl", dialect, lambda rank, host: NcclLink(bindings, memory(), rank))


class NcclLink:
    """A `Link`. Waits poll NCCL's state, so that a deadline and `abort` always end them."""

    def __init__(self, bindings: Any, memory: PayloadMemory, rank: int) -> None:
        self._nccl, self._memory, self._rank, self._peer = bindings, memory, rank, 1 - rank
        self._lock = Lock()
        self._comm: int | None = None
        self._over = False
        self._buffers: dict[int, Tensor] = {}
        """Buffers under way, by address: NCCL may write to them until an abort has returned."""

    def connect(self, exchange: Exchange) -> None:
        """See `Link`. The receiver's unique id holds the address at which NCCL meets; only the exchange carries it."""
        nccl = self._nccl
        self._memory.use()
        if self._rank == RECEIVER:
            self._warm_up()
            unique = self._call(nccl.get_unique_id)
            exchange.put("id", bytes(memoryview(unique)))
        else:
            said = exchange.get("id")
            if len(said) != nccl.unique_id_dtype.itemsize:
                raise NodeLost(f"nccl: the peer's id has {len(said)} bytes")
            unique = nccl.UniqueId.from_buffer(bytearray(said))
        config = nccl.Config()
        config.blocking, config.max_ctas = 0, MAX_CTAS
        with self._lock:
            if self._over:
                raise NodeLost("the link is closed")
            self._comm = self._call(partial(nccl.comm_init_rank_config, 2, unique.ptr, self._rank, config.ptr))
        self._wait(lambda: True, CONNECT_TIMEOUT_S)

    def post(self, size: int) -> Callable[[], Payload]:
        """See `Link`. The receive starts when the function returned is called; until then the sender's kernel waits."""
        return partial(self._arrive, self._memory.room(size))

    def send(self, payload: Payload) -> None:
        """See `Link`."""
        self._run(self._nccl.send, self._memory.stage(payload))

    def abort(self) -> None:
        """See `Link`."""
        with self._lock:
            self._over = True
            comm, self._comm = self._comm, None
        if comm is not None:
            Thread(target=self._abort, args=(comm,), name="abort", daemon=True).start()

    def _abort(self, comm: int) -> None:
        self._memory.use()
        self._call(partial(self._nccl.comm_abort, comm))
        self._buffers.clear()

    def _warm_up(self) -> None:
        """Compile the kernels that check parcels, before a parcel waits for them."""
        self._memory.payload(self._memory.room(WARM_BYTES)).pieces((WARM_BYTES,), 0)

    def _arrive(self, buffer: Tensor) -> Payload:
        self._run(self._nccl.recv, buffer)
        return self._memory.payload(buffer)

    def _run(self, operation: Callable[..., object], buffer: Tensor) -> None:
        """Enqueue a transfer and wait until it is done."""
        self._memory.use()
        where = buffer.data_ptr(), buffer.numel(), UINT8, self._peer
        self._buffers[buffer.data_ptr()] = buffer
        with self._lock:
            if self._comm is None:
                raise NodeLost("the link is closed")
            self._call(partial(operation, *where, self._comm, self._memory.stream))
        self._wait(lambda: True, PARCEL_TIMEOUT_S)
        self._wait(self._memory.mark(), PARCEL_TIMEOUT_S)
        self._buffers.pop(buffer.data_ptr(), None)  # an abort may have dropped it

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until NCCL has accepted all calls and `done` returns True."""
        deadline = monotonic() + timeout_s
        while True:
            with self._lock:
                if self._comm is None:
                    raise NodeLost("the link is closed")
                state = int(self._call(partial(self._nccl.comm_get_async_error, self._comm)))
            if state not in (SUCCESS, IN_PROGRESS):
                raise NodeLost(f"nccl: {self._nccl.get_error_string(state)}")
            if state == SUCCESS and done():
                return
            if monotonic() > deadline:
                raise DeadlineExceeded(f"nccl: nothing came of it within {timeout_s:g} s")
            sleep(POLL_S)

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._nccl.NCCLError as error:
            raise NodeLost(f"nccl: {error}") from error


def _dotted(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
