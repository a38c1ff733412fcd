"""`python -m bench.private.party JOB.json`: one party of a protocol; runs in the environment with SPU.

It prints a line of JSON after every computation, and at last what it has learned: nothing unless it is the client. It
ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import spu
from spu import api
from spu.utils import frontend

from bench.private.jobs import Job, read_job
from bench.private.session import CLIENT, Function, Values, respond

LINK: Final = re.compile(r"total send bytes (\d+), recv bytes (\d+), send actions (\d+)")
CONNECT_MS: Final = 60_000
SECRET: Final = spu.Visibility.VIS_SECRET
PUBLIC: Final = spu.Visibility.VIS_PUBLIC


class Party:
    """A `Machine` that holds its own shares of all arrays."""

    def __init__(self, job: Job, log: Path) -> None:
        """Connect to the other parties. Raises `RuntimeError` if they do not come in time."""
        options = spu.libspu.logging.LogOptions()
        options.enable_console_logger, options.system_log_path = False, str(log)
        spu.libspu.logging.setup_logging(options)
        desc = spu.libspu.link.Desc()
        for rank, address in enumerate(job.addresses):
            desc.add_party(f"party{rank}", address)
        desc.recv_timeout_ms = desc.http_timeout_ms = round(1000 * job.limit_s)
        desc.connect_retry_interval_ms = 100
        desc.connect_retry_times = CONNECT_MS // desc.connect_retry_interval_ms
        self._rank, self._log, self._read = job.rank, log, 0
        self._link = spu.libspu.link.create_brpc(desc, job.rank)
        config = spu.RuntimeConfig(
            protocol=api.parse_protocol_kind(job.protocol),
            field=spu.FieldType.FM64,
            fxp_fraction_bits=job.fraction_bits,
        )
        config.enable_pphlo_profile = True
        self._runtime, self._io = spu.Runtime(self._link, config), spu.Io(len(job.addresses), config)
        self._shapes, self._compiled = dict[str, tuple[Any, tuple[int, ...]]](), dict[Any, Any]()

    def share(self, name: str, owner: int, value: Values | None, shape: tuple[int, ...]) -> None:
        """Make or receive shares of `value`. The owner makes all shares and sends each party its own."""
        if owner == self._rank:
            assert value is not None
            assert value.shape == shape
            shares = self._io.make_shares(np.ascontiguousarray(value, np.float32), SECRET)
            for rank, each in enumerate(shares):
                if rank != owner:
                    self._link.send(rank, _packed(each))
            share = shares[owner]
        else:
            share = _unpacked(self._link.recv(owner))
        self._keep(name, share, np.dtype(np.float32), shape)

    def run(self, label: str, function: Function, inputs: Sequence[str | Values], outputs: Sequence[str]) -> None:
        """Run a function with the others, who compile the same program."""
        names = list[str]()
        for nth, given in enumerate(inputs):
            name = given if isinstance(given, str) else f"public {nth}"
            if not isinstance(given, str):
                self._keep(name, self._io.make_shares(given, PUBLIC)[self._rank], given.dtype, given.shape)
            names.append(name)
        visible = tuple(SECRET if isinstance(each, str) else PUBLIC for each in inputs)
        code, made = self._compile(function, [self._shapes[name] for name in names], visible)
        before = perf_counter()
        self._runtime.run(spu.Executable(name=label, input_names=names, output_names=list(outputs), code=code))
        took = perf_counter() - before
        for name, each in zip(outputs, made, strict=True):
            self._shapes[name] = (each.dtype, each.shape)
        sent, _, sends = self._traffic()
        _say({"run": label, "seconds": took, "bytes": sent, "sends": sends})

    def open(self, name: str) -> Values | None:
        """Open a secret for the client: all others send the client their shares."""
        share = self._runtime.get_var(name)
        if self._rank != CLIENT:
            self._link.send(CLIENT, _packed(share))
            return None
        others = (_unpacked(self._link.recv(rank)) for rank in range(1, self._link.world_size))
        opened: Values = self._io.reconstruct([share, *others])
        return opened

    def _keep(self, name: str, share: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        self._runtime.set_var(name, share)
        self._shapes[name] = (dtype, shape)

    def _compile(self, function: Function, given: Sequence[Any], visible: tuple[Any, ...]) -> Any:
        told = (function.func, function.args) if isinstance(function, partial) else function
        key = (told, visible, *((str(dtype), shape) for dtype, shape in given))
        if key not in self._compiled:

            def traced(*arrays: Any) -> tuple[Any, ...]:
                return tuple(function(jnp, *arrays))

            arguments = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in given]
            names = [f"in{nth}" for nth in range(len(given))]
            program, made = frontend.compile(
                frontend.Kind.JAX,
                traced,
                arguments,
                {},
                names,
                list(visible),
                lambda out: [str(i) for i in range(len(out))],
            )
            self._compiled[key] = program.code, made
        return self._compiled[key]

    def _traffic(self) -> tuple[int, int, int]:
        """(bytes sent, bytes received, messages sent) of the last run. SPU reports them only in its log."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            found = LINK.findall(log.read().decode(errors="replace"))
            self._read = log.tell()
        if not found:
            raise RuntimeError(f"{self._log}: SPU did not say what it sent")
        sent, received, sends = map(int, found[-1])
        return sent, received, sends


def _packed(share: Any) -> bytes:
    parts = [share.meta, *share.share_chunks]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _unpacked(data: bytes) -> Any:
    share, parts, at = spu.libspu.Share(), list[bytes](), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    share.meta, share.share_chunks = parts[0], parts[1:]
    return share


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def main(path: str) -> None:
    """Take part in one job."""
    job = read_job(Path(path))
    threading.Thread(target=_end_with_input, daemon=True).start()
    weights, dealt = (dict(np.load(file)) if file else None for file in (job.weights, job.dealt))
    party = Party(job, Path(path).with_suffix(".log"))
    _say({"met": f"spu {version('spu')}, jax {jax.__version__}, numpy {np.__version__}"})
    _say({"learned": respond(party, job.task, job.prompt, weights, dealt)})
    sys.stdout.flush()
    os._exit(0)  # SPU's threads are slow to end


if __name__ == "__main__":
    main(sys.argv[1])
