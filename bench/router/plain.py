"""A server that only sends tokens, without a router: `python -m bench.router.plain`.

It answers as the router does over the scripted nodes (`bench.router.nodes`): `max_tokens` tokens with pauses of `seed`
milliseconds, each with the time at which it was sent. The delays that clients measure with it come from the clients and
the machine. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from time import monotonic

from node.announcement import announce

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve the requests of one connection."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            body = json.loads(await reader.readexactly(int(found.group(1)) if found else 0))
            writer.write(_HEAD)
            await _tokens(writer, body["max_tokens"], body["seed"] / 1000)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client has left
    finally:
        writer.close()


async def _tokens(writer: asyncio.StreamWriter, count: int, pause_s: float) -> None:
    began = monotonic()
    for index in range(count):
        await asyncio.sleep(began + index * pause_s - monotonic())
        event = {"choices": [{"text": "a", "index": 0, "logprobs": {"token_logprobs": [-monotonic()]}}]}
        text = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(text), text))
        await writer.drain()


async def main() -> None:
    """Serve until standard input ends."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    host, port = server.sockets[0].getsockname()[:2]
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    announce(http=f"http://{host}:{port}")
    async with server:
        await over.wait()
    os._exit(0)  # do not wait for streams that still run


if __name__ == "__main__":
    asyncio.run(main())
