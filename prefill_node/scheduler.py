"""Which prompt tokens run next: first come, first served, by a token budget. Numbers only, no tensors.

A forward pass takes up to `chunk_tokens` tokens: the oldest prompt first, then as much of the following ones as fits.
A prompt that does not end in a pass is cut at a page boundary, so every chunk but the last is whole pages. A prompt
holds pages for all its tokens from its first chunk until its last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hackkv.pages import Grant, PagePool

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class Prompt(Generic[Owner]):
    """A prompt on its way: `done` of `num_tokens` tokens are in the cache. `owner` is opaque here."""

    owner: Owner
    num_tokens: int
    done: int = 0
    grant: Grant | None = None
    left: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Owner]):
    """Tokens [start, start + count) of a prompt, to run in the next pass; the prompt holds `grant`."""

    prompt: Prompt[Owner]
    grant: Grant
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.start + self.count == self.prompt.num_tokens


class PrefillScheduler(Generic[Owner]):
    """Queue of prompts over a pool of pages. Prompts that leave during a pass give their pages back after it."""

    def __init__(self, pool: PagePool, page_tokens: int, chunk_tokens: int) -> None:
        if chunk_tokens < page_tokens:
            raise ValueError(f"chunk_tokens {chunk_tokens} is less than a page of {page_tokens}")
        self._pool = pool
        self._page_tokens = page_tokens
        self._chunk_tokens = chunk_tokens // page_tokens * page_tokens
        self._waiting: deque[Prompt[Owner]] = deque()
        self._running: list[Prompt[Owner]] = []
        self._in_pass: list[Chunk[Owner]] = []

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(prompt.num_tokens - prompt.done for prompt in (*self._waiting, *self._running))

    @property
    def waiting(self) -> int:
        """Prompts that hold no pages yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Prompts that hold pages."""
        return len(self._running)

    def fits(self, num_tokens: int) -> bool:
        """Whether a prompt of this length can ever run here."""
        return -(-num_tokens // self._page_tokens) <= self._pool.num_pages

    def add(self, prompt: Prompt[Owner]) -> None:
        """Queue a prompt."""
        self._waiting.append(prompt)

    def schedule(self, admit: Callable[[Owner], bool] = lambda _: True) -> list[Chunk[Owner]]:
        """Start a pass: its chunks, oldest prompt first; empty when nothing can run.

        `admit` is asked last of all before a prompt starts: whether there is room for what it will leave behind.
        """
        budget = self._chunk_tokens
        chunks: list[Chunk[Owner]] = []
        for prompt in self._running:
            budget -= self._take(prompt, budget, chunks)
        while budget and self._waiting:
            prompt = self._waiting[0]
            pages = -(-prompt.num_tokens // self._page_tokens)
            fits = pages <= self._pool.free_pages and self._pool.free_slots > 0
            if self._next_count(prompt, budget) == 0 or not fits or not admit(prompt.owner):
                break
            prompt.grant = self._pool.take(pages)
            self._running.append(self._waiting.popleft())
            budget -= self._take(prompt, budget, chunks)
        self._in_pass = chunks
        return chunks

    def commit(self) -> None:
        """End a pass that succeeded: its tokens are done, and complete or departed prompts give their pages back."""
        for chunk in self._in_pass:
            chunk.prompt.done = chunk.start + chunk.count
        self._end_pass()

    def abandon(self) -> None:
        """End a pass that failed: nothing is done, and the same chunks will be scheduled again."""
        self._end_pass()

    def leave(self, prompt: Prompt[Owner]) -> None:
        """Take a prompt out, whatever its state; a prompt that left already is ignored."""
        prompt.left = True
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        elif not any(chunk.prompt is prompt for chunk in self._in_pass):
            self._release(prompt)

    def _take(self, prompt: Prompt[Owner], budget: int, chunks: list[Chunk[Owner]]) -> int:
        count = self._next_count(prompt, budget)
        if count and prompt.grant:
            chunks.append(Chunk(prompt, prompt.grant, prompt.done, count))
        return count

    def _next_count(self, prompt: Prompt[Owner], budget: int) -> int:
        """All that is left of the prompt, or as many whole pages as fit."""
        remaining = prompt.num_tokens - prompt.done
        return remaining if remaining <= budget else budget // self._page_tokens * self._page_tokens

    def _end_pass(self) -> None:
        chunks, self._in_pass = self._in_pass, []
        for chunk in chunks:
            if chunk.prompt.left or chunk.prompt.done == chunk.prompt.num_tokens:
                self._release(chunk.prompt)

    def _release(self, prompt: Prompt[Owner]) -> None:
        if prompt.grant is not None:
            self._pool.give_back(prompt.grant)
            prompt.grant = None
            self._running.remove(prompt)
