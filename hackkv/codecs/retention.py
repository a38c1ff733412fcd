"""The rows of a prompt that stay: first ones, last ones, and between them those with the most votes.

One rule, with other numbers for each method. The codecs `streamingllm`, `snapkv`, `h2o`, `mpcache` (`hackkv.codecs`):

============  =====  ====  ======  ====  =====  =================================================================
method        first  last  voters  pool  pairs  source
============  =====  ====  ======  ====  =====  =================================================================
streamingllm  4      rest  none    1     no     arXiv 2309.17453, §3.2: sinks and a window
snapkv        0      32    32      5     no     arXiv 2404.14469, §4: votes of a window, pooled
h2o           0      12.5% 100%    1     no     arXiv 2306.14048, Algorithm 1: accumulated attention, recent rows
mpcache       4      64    20%     1     yes    §4.2: votes of the last 20%; Algorithm 3 and §4.4: layers share
============  =====  ====  ======  ====  =====  =================================================================

`voters` are the last queries of the prompt, whose attention counts (`hack_kernels.voting`). With `pool`, a row's votes
are summed over that many neighbours. With `pairs` layers 2 and 3, 4 and 5 and so on keep the same rows: the even layer
chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor

from hackkv.config import Frozen

OWN_LAYERS: Final = 2
"""First layers, which choose by themselves even with `pairs`: they are less alike (MPCache §4.4)."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Rows, or a percentage of a prompt's."""

    rows: int = 0
    percent: float = 0.0

    def of(self, tokens: int) -> int:
        """The amount in rows of a prompt of `tokens` tokens, rounded up, at most all."""
        return min(tokens, self.rows + -int(-tokens * self.percent // 100))

    @property
    def everything(self) -> bool:
        """Whether the amount is all rows of any prompt."""
        return self.percent == 100

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else str(self.rows)


def _amount(given: Any) -> Amount:
    """The amount that a setting says. Raises `ValueError`."""
    text = str(given).strip()
    number = text.removesuffix("%")
    try:
        rows, percent = (0, float(number)) if text.endswith("%") else (int(number), 0.0)
    except ValueError:
        rows, percent = -1, 0.0
    if rows < 0 or not 0 <= percent <= 100:
        raise ValueError(f"{given!r} is neither a number of rows nor a percentage such as 25%")
    return Amount(rows, percent)


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return number


Rows = Annotated[Amount, BeforeValidator(_amount)]


class Retention(Frozen):
    """Settings of an eviction; every one is part of the fingerprint."""

    budget: Rows = Amount(percent=25)
    """Rows of a prompt that stay in all. `first` and `last` rows stay whatever the budget is."""
    first: int = Field(default=0, ge=0)
    last: Rows = Amount(32)
    """Last rows that stay. Without `voters`, all rows that stay are first or last ones."""
    voters: Rows = Amount(32)
    """Last queries, whose attention chooses the other rows."""
    pool: Annotated[int, AfterValidator(_odd)] = Field(default=1, ge=1)
    """Rows over which votes are summed: an odd number."""
    pairs: bool = False
    """Whether two layers share a choice."""

    def rows_held(self, tokens: int) -> int:
        """The number of rows that stay of a prompt of `tokens` tokens."""
        forced = self.first + (self.last.of(tokens) if self.voters_of(tokens) else 0)
        return min(tokens, max(1, self.budget.of(tokens), forced))

    def voters_of(self, tokens: int) -> int:
        """The number of queries that vote in a prompt of `tokens` tokens."""
        return self.voters.of(tokens)

    def chooser(self, layer: int) -> int:
        """The layer whose votes choose the rows of `layer`."""
        return layer - layer % 2 if self.pairs and layer >= OWN_LAYERS else layer

    def choose(self, votes: Tensor) -> Tensor:
        """The rows that stay: [Hkv, rows_held(T)] int64, ascending, by `votes` [Hkv, T] int64.

        Among rows with equally many votes, earlier ones stay.
        """
        heads, tokens = votes.shape
        held = self.rows_held(tokens)
        first = min(self.first, held)
        last = min(self.last.of(tokens), held - first) if self.voters_of(tokens) else held - first
        rest = votes[:, first : tokens - last]
        if self.pool > 1:
            rest = F.pad(rest, (self.pool // 2,) * 2).unfold(-1, self.pool, 1).sum(-1)
        ranked = rest.sort(dim=-1, descending=True, stable=True).indices[:, : held - first - last] + first
        ends = (torch.arange(*end, device=votes.device) for end in ((0, first), (tokens - last, tokens)))
        before, after = (end.expand(heads, -1) for end in ends)
        return torch.cat((before, ranked.sort(dim=-1).values, after), dim=-1)
