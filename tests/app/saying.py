"""A stand-in for a child process of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence


class Saying:
    """A process that says `words` on its standard output, each after its pause in seconds, and then nothing."""

    def __init__(self, words: Sequence[Mapping[str, object]], pauses: Sequence[float]) -> None:
        self.stdout, self.ended = asyncio.StreamReader(), False
        self._words, self._pauses, self._at = words, pauses, 0

    def order(self, arguments: Sequence[str]) -> None:
        """Begin."""
        self._say_later()

    async def end(self) -> None:
        """End."""
        self.kill()

    def kill(self) -> None:
        """End at once."""
        self.ended = True

    def _say_later(self) -> None:
        if self._at < len(self._pauses):
            asyncio.get_running_loop().call_later(self._pauses[self._at], self._say)

    def _say(self) -> None:
        self.stdout.feed_data(json.dumps(self._words[self._at]).encode() + b"\n")
        self._at += 1
        self._say_later()
