"""Links over NIXL, NVIDIA's library for moving KV, on UCX: RDMA, shared memory or TCP, whichever both ends have.

    sender    copies a parcel to its slab, says "here" ...................... hears "read"
    receiver  ................................. hears "here", reads the slab, "read" follows

The receiver reads; no end writes to the memory of the other. So if a peer is late, or has given the pair up, a checksum
may fail, but no memory that has another use by then is overwritten. Payloads are in host memory at both ends. No thread
runs in the background: each end drives its transfers while it waits.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import count
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, Final
from uuid import uuid4

import numpy as np
import torch

from hackkv.errors import ConfigError, DeadlineExceeded, NodeLost
from hackkv.types import Payload
from transport.coder import MAX_PAYLOAD_BYTES
from transport.link import CONNECT_TIMEOUT_S, PARCEL_TIMEOUT_S, Checksums, Exchange, LinkKind

RECEIVER: Final = 1
BACKEND: Final = "UCX"
PACKAGES: Final = {"13": "nixl_cu13", "12": "nixl_cu12"}
"""Major version of CUDA -> module of the package built for it. Without CUDA either serves."""
ADDRESS_BYTES: Final = 8
POLL_S: Final = 100e-6
LAST_ROUNDS: Final = 100
"""Rounds for which an agent makes progress before it is dropped."""
DONE, UNDER_WAY = "DONE", "PROC"  # answers of `check_xfer_state`, besides "ERR"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed build of NIXL."""

    api: Any
    version: str
    errors: tuple[type[Exception], ...]
    """Errors that its calls raise. These classes have no common base."""


def create(_: Checksums) -> LinkKind:
    """The kind `nixl` of `LINKS`. Both ends need the same major and minor version of NIXL. Raises `ConfigError`."""
    library = load_library()
    plugins = library.api.nixl_agent(uuid4().hex, library.api.nixl_agent_config(backends=[])).get_plugin_list()
    if BACKEND not in plugins:
        raise ConfigError(f"wire: nixl: {library.version} is built without {BACKEND}")
    name = f"nixl {library.version.rpartition('.')[0]}"
    return LinkKind("nixl", name, lambda rank, host: NixlLink(library, rank))


def load_library() -> Library:
    """The build for torch's CUDA. Raises `ConfigError` that names what is missing.

    NIXL's import sets up a log of its own on standard output. Its lines are redirected to the log of this process.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    names = [PACKAGES[major]] if major in PACKAGES else list(PACKAGES.values())
    raising = logging.raiseExceptions
    for name in names:
        try:
            api, bindings = importlib.import_module(name), importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"wire: nixl: {name}: {str(error).splitlines()[0]}") from error
        finally:
            logging.raiseExceptions = raising
        own = logging.getLogger("nixl")
        own.handlers.clear()
        own.propagate = True
        own.setLevel(logging.WARNING)
        errors = [each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
        return Library(api, version(name.replace("_", "-")), tuple(errors))
    missing = " nor ".join(names)
    raise ConfigError(f"wire: nixl: there is no {missing}: pip install 'hackkv[nixl]', or nixl-cu12 for CUDA 12")


class NixlLink:
    """A `Link`: an agent with one slab of registered memory, as large as the largest parcel."""

    def __init__(self, library: Library, rank: int) -> None:
        self._library, self._rank = library, rank
        self._lock = Lock()
        """Held during every call of NIXL."""
        self._agent: Any = None
        self._over = False
        self._peer = ""
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._registered: Any = None
        """The agent's handle of the slab."""
        self._transfer: Any = None
        """Handle of the transfer under way: NIXL may write to the slab until the handle is released."""
        self._there = 0
        """Address of the sender's slab."""
        self._heard = deque[bytes]()
        self._numbers = count(1)
        """Numbers of parcels, at both ends in the same order."""

    def connect(self, exchange: Exchange) -> None:
        """See `Link`. Only the exchange carries an end's metadata and the address of its slab."""
        api, slab = self._library.api, torch.empty(MAX_PAYLOAD_BYTES, dtype=torch.uint8)
        with self._lock, self._translating():
            if self._over:
                raise NodeLost("the link is closed")
            self._slab = slab
            self._agent = api.nixl_agent(
                uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            )
            self._registered = self._agent.register_memory(slab)
            own = slab.data_ptr().to_bytes(ADDRESS_BYTES, "little") + self._agent.get_agent_metadata()
        exchange.put(str(self._rank), own)
        said = exchange.get(str(1 - self._rank))
        with self._calling() as agent:
            self._there = int.from_bytes(said[:ADDRESS_BYTES], "little")
            self._peer = agent.add_remote_agent(said[ADDRESS_BYTES:])
            if isinstance(self._peer, bytes):
                self._peer = self._peer.decode(errors="replace")
        deadline = monotonic() + CONNECT_TIMEOUT_S
        if self._rank == RECEIVER:
            self._say(b"there")
            self._hear(b"there", deadline)
        else:
            self._hear(b"there", deadline)
            self._say(b"there")

    def post(self, size: int) -> Callable[[], Payload]:
        """See `Link`. There is nothing to prepare."""
        return partial(self._read, size)

    def send(self, payload: Payload) -> None:
        """See `Link`."""
        number, deadline = next(self._numbers), monotonic() + PARCEL_TIMEOUT_S
        with self._calling():
            self._slab.numpy()[: len(payload)] = np.frombuffer(bytes(payload), dtype=np.uint8)
        self._say(b"here %d" % number)
        self._hear(b"read %d" % number, deadline)

    def abort(self) -> None:
        """See `Link`. The agent ends after the call of NIXL that is under way."""
        if not self._over:
            self._over = True
            Thread(target=self._close, name="abort").start()

    def _read(self, size: int) -> Payload:
        number, deadline = next(self._numbers), monotonic() + PARCEL_TIMEOUT_S
        self._hear(b"here %d" % number, deadline)
        here = self._slab[:size]
        with self._calling() as agent:
            remote = agent.get_xfer_descs([(self._there, size, 0)], "DRAM")
            local = agent.get_xfer_descs(here)
            self._transfer = agent.initialize_xfer("READ", local, remote, self._peer, b"read %d" % number)
            state = agent.transfer(self._transfer)
        while state == UNDER_WAY:
            self._rest(deadline)
            with self._calling() as agent:
                state = agent.check_xfer_state(self._transfer)
        if state != DONE:
            raise NodeLost(f"nixl: parcel {number} could not be read")
        with self._calling() as agent:
            agent.release_xfer_handle(self._transfer)
            self._transfer = None
        return here.numpy().tobytes()

    def _say(self, word: bytes) -> None:
        with self._calling() as agent:
            agent.send_notif(self._peer, word)

    def _hear(self, word: bytes, deadline: float) -> None:
        """Wait for the peer's next message. Raises `NodeLost` if it is not `word`."""
        while not self._heard:
            with self._calling() as agent:
                self._heard.extend(agent.get_new_notifs().get(self._peer, ()))
            if not self._heard:
                self._rest(deadline)
        said = self._heard.popleft()
        if said != word:
            raise NodeLost(f"nixl: the peer says {said[:40]!r} where {word!r} is due")

    def _rest(self, deadline: float) -> None:
        if monotonic() > deadline:
            raise DeadlineExceeded("nixl: the peer did not answer in time")
        sleep(POLL_S)

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """The agent, for a call that returns at once. Meanwhile an abort touches neither the agent nor the slab."""
        with self._lock, self._translating():
            if self._over or self._agent is None:
                raise NodeLost("the link is closed")
            yield self._agent

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except self._library.errors as error:
            raise NodeLost(f"nixl: {error}") from error

    def _close(self) -> None:
        """End the transfer under way, then the agent, and then its memory."""
        with self._lock:
            if self._agent is not None:
                self._take_leave(self._agent)
            self._transfer = self._registered = None
            self._agent = None
            self._slab = torch.empty(0, dtype=torch.uint8)

    def _take_leave(self, agent: Any) -> None:
        """Release what the agent holds. UCX may abort the process if an agent is dropped that still has a peer, unsent
        messages or memory (openucx/ucx#1050, ai-dynamo/nixl#2025, ai-dynamo/modelexpress#649)."""
        with suppress(*self._library.errors):
            if self._transfer is not None:
                agent.release_xfer_handle(self._transfer)
        with suppress(*self._library.errors):
            if self._peer:
                agent.remove_remote_agent(self._peer)
            for _ in range(LAST_ROUNDS):  # the connection to the peer closes only while the agent makes progress
                agent.get_new_notifs()
        with suppress(*self._library.errors):
            if self._registered is not None:
                agent.deregister_memory(self._registered)
