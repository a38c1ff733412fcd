"""The process from which the roles of a cluster are forked. `app.forking` starts it.

It is a fork of the command that needs it, or `python -m app.forkserver FD`.

It imports what all roles need and forks the router. Then it imports what nodes need (`app.stock`), loads the model
once, and forks the nodes. They share all of this, copy on write, and are ready in a fraction of a second.

A process may only be forked while it has nothing that a fork does not copy. So there are no threads here, no event loop
and no gRPC channel, and nothing is computed on more than one thread: a child would wait forever for OpenMP's helper
threads, which it does not have. The garbage collector is off, since it would write into shared pages (`gc.freeze`).
After some time without requests, the server unmaps library code that only start-up needed, about 70 MiB.

Requests and answers are JSON, one a packet of the socket FD:

    {"fork": role, "name": ..., "loss": {...} or null}, with standard input and output  ->  {"pid": ...}
    {"load": {"model": {...}, "codec": {...}}}  ->  {} or {"failed": ..., "setting": true or false}

A forked role reads its arguments, a JSON list, from the first line of its standard input. Its parent is not this
process but the nearest subreaper above, which started this process. The subreaper waits for the role, even if this
process is gone.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, NoReturn

import node.process
import transport.rpc_server
from app.roles import ROLES, ROUTER
from hackkv.errors import ConfigError, HackkvError
from hackkv.heap import REST_S, unmap_code
from node.children import call_me

MAX_REQUEST: Final = 1 << 16
"""The most bytes of a request."""
NAME: Final = "fork server"
"""The name in `ps` and `top`."""
SHARED: Final = (node.process, transport.rpc_server)
"""Modules that the router shares with nodes, imported before any of them is forked."""


class ForkServer:
    """Answers requests until the other end closes the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._stock: Any = None
        """An `app.stock.Stock`, once a request needs it."""

    def serve(self) -> None:
        """Answer requests until the other end of the channel closes."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._channel, MAX_REQUEST, 2)
            except TimeoutError:
                unmap_code()
                self._channel.settimeout(None)
                continue
            except ConnectionResetError:
                return  # the client is gone and has not read our last answer
            self._channel.settimeout(REST_S)
            if not packet:
                return
            answer = self._answer(json.loads(packet), fds)
            for fd in fds:
                os.close(fd)
            with suppress(BrokenPipeError):
                self._channel.send(json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        if self._stock is None and request.get("fork") != ROUTER:
            self._stock = import_module("app.stock").Stock()
        if "fork" in request:
            return {"pid": self._fork(request, *fds)}
        try:
            self._stock.load(request["load"])
        except HackkvError as error:
            return {"failed": str(error), "setting": isinstance(error, ConfigError)}
        return {}

    def _fork(self, request: dict[str, Any], stdin: int, stdout: int) -> int:
        """Fork a grandchild and return its pid. The process between it and us ends at once, so it is not our child.

        The grandchild reports its pid itself, after it has taken its name.
        """
        sys._clear_type_cache()  # each child would write to the cached names when it replaces them
        gc.freeze()
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            call_me(request["name"])
            os.write(writer, os.getpid().to_bytes(8, "little"))
            for fd in (reader, writer, self._channel.fileno()):
                os.close(fd)
            self._become(request, stdin, stdout)
        os.waitpid(between, 0)
        child = int.from_bytes(os.read(reader, 8), "little")
        os.close(reader)
        os.close(writer)
        return child

    def _become(self, request: dict[str, Any], stdin: int, stdout: int) -> NoReturn:
        """Be the requested role to its end. `os._exit` skips the exit handlers of the fork server."""
        code = 1
        try:
            for fd, standard in ((stdin, 0), (stdout, 1)):
                os.dup2(fd, standard)
                os.close(fd)
            gc.enable()
            code = self._run(request)
        except SystemExit as end:  # raised by argparse
            code = end.code if isinstance(end.code, int) else 1
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(self, request: dict[str, Any]) -> int:
        router = import_module(ROLES[ROUTER]) if request["fork"] == ROUTER else None
        line = sys.stdin.readline()
        if not line:
            return 0  # the cluster has ended
        arguments = json.loads(line)
        if router is not None:
            return int(router.main(arguments))
        return int(self._stock.run(request["fork"], arguments, request["loss"]))


def main(channel: socket.socket) -> None:
    """Be a fork server until the other end of `channel` closes."""
    gc.disable()
    call_me(NAME)
    ForkServer(channel).serve()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
