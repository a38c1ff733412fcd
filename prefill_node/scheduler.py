"""The scheduler of prompts: it chooses, by a token budget, the prompt tokens that run next. It has no tensors.

A forward pass takes up to `chunk_tokens` tokens. Half of them belong to the oldest prompt, so that a long prompt ends
however many others come. (With a budget of one page, every other pass belongs to it.) The rest goes to the prompts with
the fewest tokens left. So a short prompt does not wait for a long one: it runs in the first pass that starts after its
arrival. Tokens that one half does not need go to the other. A prompt that does not end in a pass is cut at a page
boundary, so every chunk but the last is whole pages.

A prompt starts when the pool has all its pages, and holds them until its last chunk. So every prompt that has started
can end. If the oldest waiting prompt finds no room, at most `MAX_SKIPS` others start before it. A pass starts no more
prompts once `MAX_SKIPS` of them found no room, because the prompts that it would try next need more room.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hackkv.errors import ConfigError
from hackkv.page_names import PageName
from prefill_node.prefix_pool import PrefixGrant, PrefixPool

MAX_SKIPS = 8
"""The limit of two numbers: of younger prompts that start before a prompt without room, and of prompts without room
that one pass tries."""

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class Prompt(Generic[Owner]):
    """A prompt on its way: `done` of `num_tokens` tokens are in the cache. `owner` is opaque here."""

    owner: Owner
    num_tokens: int
    names: Sequence[PageName] = ()
    """The names of its full pages."""
    hit: bool = True
    """Whether it may share known pages instead of computing them."""
    done: int = 0
    grant: PrefixGrant | None = None
    left: bool = False
    number: int = 0
    """The order of arrival: less is older."""
    last_pass: int = -1
    """The last pass in which it ran."""
    blocked: bool = False
    """Whether the last try to start it found no room."""
    overtaken: int = 0
    """Younger prompts that have started since then, while it was the oldest waiting one."""
    cached_tokens: int = 0
    """Tokens that were in the cache when it started."""

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return self.num_tokens - self.done


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Owner]):
    """Tokens [start, start + count) of a prompt, to run in the next pass; the prompt holds `grant`."""

    prompt: Prompt[Owner]
    grant: PrefixGrant
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.start + self.count == self.prompt.num_tokens


class PrefillScheduler(Generic[Owner]):
    """Queue of prompts over a pool of pages. Prompts that leave during a pass give their pages back after it.

    Raises `ConfigError` if the budget of a pass is less than a page.
    """

    def __init__(self, pool: PrefixPool, chunk_tokens: int, *, starts_over: bool = False) -> None:
        """`starts_over`: a pass overwrites rows that it reads (`KvCodec.attend`), so a failed pass cannot be repeated
        and its prompts start over."""
        if chunk_tokens < pool.page_tokens:
            raise ConfigError(f"chunk_tokens: {chunk_tokens} is less than a page of {pool.page_tokens} tokens")
        self.pool = pool
        self._starts_over = starts_over
        self._budget = chunk_tokens // pool.page_tokens * pool.page_tokens
        self._waiting: list[Prompt[Owner]] = []
        self._running: list[Prompt[Owner]] = []
        self._in_pass: list[Chunk[Owner]] = []
        self._pass = 0
        self._in_vain = 0
        self._added = 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(prompt.remaining for prompt in (*self._waiting, *self._running))

    @property
    def waiting(self) -> int:
        """Prompts that hold no pages yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Prompts that hold pages."""
        return len(self._running)

    def add(self, prompt: Prompt[Owner]) -> None:
        """Queue a prompt."""
        self._added += 1
        prompt.number = self._added
        self._waiting.append(prompt)

    def schedule(self, admit: Callable[[Owner], bool] = lambda _: True) -> list[Chunk[Owner]]:
        """Start a pass: its chunks, oldest prompt first; empty when nothing can run.

        `admit` is the last check before a prompt starts: whether host memory has room for its KV.
        """
        prompts = sorted((*self._running, *self._waiting), key=lambda prompt: prompt.number)
        if not prompts:
            return []
        self._in_vain = 0
        counts = dict.fromkeys(prompts, 0)
        budget = self._budget - self._give(prompts[0], counts, self._reserve(prompts[0]), admit)
        for prompt in sorted(prompts, key=lambda prompt: prompt.remaining):
            if not budget:
                break
            budget -= self._give(prompt, counts, budget, admit)
        self._in_pass = [
            Chunk(prompt, prompt.grant, prompt.done, count)
            for prompt, count in counts.items()
            if count and prompt.grant is not None
        ]
        for chunk in self._in_pass:
            chunk.prompt.last_pass = self._pass
        self._pass += 1
        return self._in_pass

    def commit(self) -> None:
        """End a pass that succeeded: its tokens are done, and complete or departed prompts give their pages back."""
        for chunk in self._in_pass:
            chunk.prompt.done = chunk.start + chunk.count
            self.pool.publish(chunk.grant, chunk.prompt.done // self.pool.page_tokens)
        self._end_pass()

    def abandon(self) -> None:
        """End a pass that failed: nothing is done, and the same tokens will be scheduled again.

        Prompts that start over wait again, with their age. They may still share pages that they sealed before.
        """
        chunks = self._in_pass
        self._end_pass()
        for chunk in chunks:
            if self._starts_over and chunk.prompt.grant is not None:
                self._release(chunk.prompt)
                chunk.prompt.done = chunk.prompt.cached_tokens = 0
                insort(self._waiting, chunk.prompt, key=lambda prompt: prompt.number)

    def leave(self, prompt: Prompt[Owner]) -> None:
        """Take a prompt out, whatever its state; a prompt that left already is ignored."""
        prompt.left = True
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        elif not any(chunk.prompt is prompt for chunk in self._in_pass):
            self._release(prompt)

    def _reserve(self, oldest: Prompt[Owner]) -> int:
        """The oldest prompt's share of the budget, in tokens."""
        page = self.pool.page_tokens
        if self._budget > page:
            return self._budget // page // 2 * page
        return 0 if oldest.last_pass == self._pass - 1 else page

    def _give(
        self, prompt: Prompt[Owner], counts: dict[Prompt[Owner], int], limit: int, admit: Callable[[Owner], bool]
    ) -> int:
        """Give a prompt up to `limit` tokens of the pass; start it if it waits. Returns how many tokens it got."""
        if not self._cut(prompt.remaining, limit) or not (prompt.grant or self._start(prompt, admit)):
            return 0
        count = self._cut(self._stretch(prompt) - counts[prompt], limit)  # starting may have found cached pages
        counts[prompt] += count
        return count

    def _stretch(self, prompt: Prompt[Owner]) -> int:
        """Tokens of a prompt that one pass may take. A prompt that computes known pages again, since there is no resume
        point at their end, stops there and leaves one. Any other prompt may take all that remain."""
        known = 0 if prompt.grant is None else prompt.grant.known_tokens - prompt.done
        return known if known > 0 else prompt.remaining

    def _cut(self, remaining: int, limit: int) -> int:
        """All `remaining` tokens if `limit` allows, else as many whole pages as fit."""
        return remaining if remaining <= limit else limit // self.pool.page_tokens * self.pool.page_tokens

    def _start(self, prompt: Prompt[Owner], admit: Callable[[Owner], bool]) -> bool:
        first = self._waiting[0]
        overtakes = prompt is not first and first.blocked
        if self._in_vain >= MAX_SKIPS or (overtakes and first.overtaken >= MAX_SKIPS):
            return False
        names = prompt.names if prompt.hit else ()
        prompt.blocked = not (self.pool.has_room(prompt.num_tokens, names) and admit(prompt.owner))
        if prompt.blocked:
            self._in_vain += 1
            return False
        prompt.grant = self.pool.take(prompt.num_tokens, prompt.names, hit=prompt.hit)
        assert prompt.grant is not None
        prompt.done = prompt.cached_tokens = prompt.grant.cached_tokens
        self._waiting.remove(prompt)
        self._running.append(prompt)
        first.overtaken += overtakes
        return True

    def _end_pass(self) -> None:
        chunks, self._in_pass = self._in_pass, []
        for chunk in chunks:
            if chunk.prompt.left or not chunk.prompt.remaining:
                self._release(chunk.prompt)

    def _release(self, prompt: Prompt[Owner]) -> None:
        if prompt.grant is not None:
            self.pool.give_back(prompt.grant)
            prompt.grant = None
            self._running.remove(prompt)
