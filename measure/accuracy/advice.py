"""Which preset to serve: one rule, and its answer for a table of presets.

The candidates are the presets that are hard to tell from exact KV. A candidate counts as fast if its job takes hardly
longer than the shortest one. The smallest fast candidate is advised. Passing the canary (`codec.max_kl`) is not enough:
just below its bound, one first choice in six differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hackkv.canary import PresetRow
from hackkv.defaults import DEFAULT_MAX_KL

MAX_KL: Final = DEFAULT_MAX_KL / 5
MIN_TOP1: Final = 0.9
MAX_PERPLEXITY_RATIO: Final = 1.03
SAME_JCT: Final = 1.05
"""Times within this factor count as equal: each was measured once, and people do not feel the difference."""
HARD_TO_TELL: Final = (
    f"KL at most {MAX_KL:g}, at least {100 * MIN_TOP1:.0f}% of first choices kept, "
    f"perplexity times {MAX_PERPLEXITY_RATIO:g} at most"
)


def hard_to_tell(row: PresetRow) -> bool:
    """Whether all three numbers of a preset's loss are near those of exact KV. A loss with a NaN never is."""
    loss = row.loss
    return loss is None or (
        loss.kl <= MAX_KL and loss.top1 >= MIN_TOP1 and loss.perplexity_ratio <= MAX_PERPLEXITY_RATIO
    )


def ranked(rows: Sequence[PresetRow], jct_s: Mapping[str, float]) -> list[PresetRow]:
    """The presets that may be advised, best first; `jct_s` is the seconds of each preset's job.

    The best preset is the smallest of those within `SAME_JCT` of the shortest job. Of equally small ones, the one that
    loses less is better. Presets that evict rows are never advised.
    that loses less is better. Presets that evict rows are never advised.
    """
    left = [row for row in rows if hard_to_tell(row) and not row.evicts]
    order = list[PresetRow]()
    while left:
        limit = SAME_JCT * min(jct_s[row.name] for row in left)
        best = min((row for row in left if jct_s[row.name] <= limit), key=lambda row: (row.share, _kl(row)))
        order.append(best)
        left.remove(best)
    return order


def advice(rows: Sequence[PresetRow], jct_s: Mapping[str, float]) -> str:
    """One line: the preset to serve, why, and the runner-up with its disadvantage."""
    order = ranked(rows, jct_s)
    if not order:
        return f"none: no preset is hard to tell from exact KV ({HARD_TO_TELL})"
    best, *others = order
    if not others:
        return f"{best.name}: the only preset that is hard to tell from exact KV ({HARD_TO_TELL})"
    return (
        f"{best.name}: of the presets that are hard to tell from exact KV ({HARD_TO_TELL}) and within "
        f"{SAME_JCT - 1:.0%} of the shortest JCT the smallest; next {_behind(others[0], best, jct_s)}"
    )


def _behind(row: PresetRow, best: PresetRow, jct_s: Mapping[str, float]) -> str:
    ours, theirs = jct_s[best.name], jct_s[row.name]
    if theirs > SAME_JCT * ours:
        return f"{row.name}, which takes {theirs / ours - 1:.0%} longer"
    if row.share > best.share:
        return f"{row.name}, which holds {100 * row.share:.1f}% of FP16's bytes, not {100 * best.share:.1f}%"
    return f"{row.name}, as small, with a KL of {_kl(row):.4f}, not {_kl(best):.4f}"


def _kl(row: PresetRow) -> float:
    return 0.0 if row.loss is None else row.loss.kl
