"""Log-probabilities of a prompt, in columns: a long prompt has millions of numbers. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Scores: TypeAlias = tuple[float, list[tuple[int, float]]]
"""A token's own log-probability, and ids and log-probabilities of the most probable tokens."""


def _float64() -> array[float]:
    return array("d")


def _uint32() -> array[int]:
    return array("I")


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt from the second on. The first has none, since nothing precedes it."""

    own: array[float] = field(default_factory=_float64)
    """[n] float64: of the token itself."""
    top_ids: array[int] = field(default_factory=_uint32)
    """[n * width] uint32: the most probable tokens in the place of each."""
    top: array[float] = field(default_factory=_float64)
    """[n * width] float64: of `top_ids`."""

    def __len__(self) -> int:
        return len(self.own)

    @property
    def width(self) -> int:
        """Alternatives of each token."""
        return len(self.top_ids) // len(self.own) if self.own else 0

    def extend(self, scores: Iterable[Scores]) -> None:
        """Add tokens, all with equally many alternatives."""
        for own, best in scores:
            self.own.append(own)
            self.top_ids.extend(token_id for token_id, _ in best)
            self.top.extend(logprob for _, logprob in best)

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        alternatives = count * self.width
        del self.own[count:], self.top_ids[alternatives:], self.top[alternatives:]

    def __iter__(self) -> Iterator[Scores]:
        """The scores of one token after another."""
        width = self.width
        for nth, own in enumerate(self.own):
            at = slice(nth * width, (nth + 1) * width)
            yield own, list(zip(self.top_ids[at], self.top[at], strict=True))
