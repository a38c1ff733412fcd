"""Throughput and hand-over latency of every wire on loopback: `python -m bench.wire`.

Both ends share one process and one event loop, so a gRPC number here is a floor: two nodes have two interpreters.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

from hackkv.errors import ConfigError
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, PlaneSpan, Receipt
from transport.base import KvSender
from transport.wires import WIRES, Loopback


async def count_bytes(handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
    """A `deliver` that keeps nothing; its receipt carries the payload bytes as `fp16_bytes`."""
    total = header = 0
    async for item in frames:
        if isinstance(item, KvFrame):
            total += len(item.payload)
            header += item.header_bytes
    return Receipt(handoff.transfer_id, handoff.num_tokens, (), header, total, 0.0)


async def make_frames(count: int, payload: bytes) -> AsyncIterator[KvFrame | HandoffEnd]:
    """`count` frames that share one payload, and the end."""
    planes = tuple(
        PlaneSpan(name, len(payload) // 4, len(payload) // 4, 0) for name in ("k.codes", "k.ms", "v.codes", "v.ms")
    )
    for seq in range(count):
        yield KvFrame("bench", 0, seq, seq, 1, 0, 8, 0, 32, 0, planes, payload)
    yield HandoffEnd("bench", 0, count, 1, checksum=0)


async def push_s(sender: KvSender, address: str, count: int, payload: bytes) -> float:
    """Seconds of one push of `count` frames."""
    began = perf_counter()
    receipt = await sender.push(address, Handoff("bench", 0, Fingerprint(()), 1), make_frames(count, payload))
    elapsed = perf_counter() - began
    if receipt.fp16_bytes != count * len(payload):
        raise AssertionError(f"{receipt.fp16_bytes} of {count * len(payload)} bytes arrived")
    return elapsed


@asynccontextmanager
async def ends(name: str) -> AsyncIterator[tuple[KvSender, str]]:
    """A sender, and the address of a listener that keeps nothing; both are warm."""
    wire = Loopback(name)
    sender, listener = wire.sender(), wire.listener()
    try:
        address = await listener.serve(count_bytes)
        await push_s(sender, address, 1, b"warm")
        yield sender, address
    finally:
        await sender.close()
        await listener.close()
        await wire.close()


async def measure(name: str, total_bytes: int, repeats: int) -> None:
    """Print MB/s (10^6 bytes, best of `repeats`) by frame size, and the latency of a 4 KiB handoff."""
    async with ends(name) as (sender, address):
        for frame_bytes in (1 << 20, 2 << 20):
            count, payload = total_bytes // frame_bytes, bytes(frame_bytes)
            best = min([await push_s(sender, address, count, payload) for _ in range(repeats)])
            print(f"{name:8} {frame_bytes >> 20} MiB frames  {count * frame_bytes / best / 1e6:8.0f} MB/s")
        small = sorted([await push_s(sender, address, 1, bytes(4096)) for _ in range(repeats * 20)])
        p99 = small[int(len(small) * 0.99)]
        print(f"{name:8} 4 KiB handoff  p50 {statistics.median(small) * 1e3:.2f} ms  p99 {p99 * 1e3:.2f} ms")


def main() -> None:
    """Measure every wire of `WIRES` that this machine can use."""
    parser = argparse.ArgumentParser("python -m bench.wire", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="payload of one handoff in MiB")
    parser.add_argument("--repeats", type=int, default=10, help="handoffs of each frame size; the fastest counts")
    args = parser.parse_args()
    for name, wire in WIRES.items():
        try:
            wire.check()
        except ConfigError as error:
            print(f"{name:8} {error}")
            continue
        asyncio.run(measure(name, args.mib << 20, args.repeats))


if __name__ == "__main__":
    main()
