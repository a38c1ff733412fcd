"""The output of `bench.private`: a section of docs/private.md, its record, and one picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.private.rules import Rules
from bench.private.session import VARIANTS

PICTURE: Final = "private.png"
ATTENTION: Final = ("choose", "attend")
"""The runs of a token that make up attention. The cost of the others does not depend on the number of rows."""
ECHO_S: Final = 0.3e-3
RATE: Final = 377e6
"""The paper's link (Appendix F.1): seconds there and back, and bytes per second."""
MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one party, mean over parties."""

    seconds: float = 0.0
    bytes: float = 0.0
    sends: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes, self.sends + other.sends)

    def over(self, number: int) -> Cost:
        """The cost divided by `number`."""
        return Cost(self.seconds / number, self.bytes / number, self.sends / number)

    @property
    def linked_s(self) -> float:
        """Calculated seconds over the paper's link if every message were waited for: an upper bound."""
        return self.seconds + self.sends * ECHO_S / 2 + self.bytes / RATE


def _bytes(cost: Cost) -> float:
    return cost.bytes


def _linked(cost: Cost) -> float:
    return cost.linked_s


WHOLE: Final[tuple[str, ...]] = ()
PAPER_FROM: Final = 512
PAPER: Final = (
    ("full / mpcache, MB of a whole token", ("full", "mpcache", WHOLE, _bytes), "3.39 to 8.37", "1.79"),
    ("the same of attention", ("full", "mpcache", ATTENTION, _bytes), "", ""),
    ("full / mpcache, s of a whole token", ("full", "mpcache", WHOLE, _linked), "1.26 to 2.01", "1.63"),
    ("the same of attention", ("full", "mpcache", ATTENTION, _linked), "", ""),
    ("dynamic / mpcache, MB of attention", ("dynamic", "mpcache", ATTENTION, _bytes), "2.76", ""),
    ("dynamic / mpcache, s of attention", ("dynamic", "mpcache", ATTENTION, _linked), "1.42", ""),
    ("full / dynamic, MB of attention", ("full", "dynamic", ATTENTION, _bytes), "below 1", ""),
    ("mpcache-rows / mpcache, MB of attention", ("mpcache-rows", "mpcache", ATTENTION, _bytes), "", ""),
    ("mpcache-rows / mpcache, s of attention", ("mpcache-rows", "mpcache", ATTENTION, _linked), "", ""),
)
"""Comparisons, and the paper's figures for them: §5.3 and Fig. 10, Appendix F.5, Fig. 11."""
PAPER_SAYS: Final = """The paper's are of a whole token at 512 to 2,048 tokens, in the shapes of GPT-2 and of LLaMA-2
with a width of 1,024, over its link, with its own top-k in SPU; its 2 parties run another protocol than SEMI2K. Its
`dynamic` selects single tokens, ours clusters. Our seconds are the calculated ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a variant."""

    text: str
    as_in_the_clear: int
    """Number of first tokens that equal those of the run in the clear."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of one protocol and prompt."""

    protocol: str
    parties: int
    tokens: int
    steps: int
    """Number of decoded tokens: all of an answer but the first."""
    costs: Mapping[str, Cost]
    """Run -> cost. The runs of an answer begin with its variant."""
    answers: Mapping[str, Answer]
    kept: tuple[int, int]
    """(rows that stayed, summed over choosing layers and heads; how many of them also stay in the clear)."""
    dealt: bool = False
    """Whether the prompt's KV was computed in the clear."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Cell:
        """The cell from the fields that `asdict` made of it."""
        costs = {run: Cost(**cost) for run, cost in told["costs"].items()}
        answers = {name: Answer(**answer) for name, answer in told["answers"].items()}
        return cls(**{**told, "costs": costs, "answers": answers, "kept": tuple(told["kept"])})

    def per_token(self, variant: str, parts: Sequence[str] = ()) -> Cost:
        """Cost of decoding one token, in all parts or in some."""
        runs = [cost for run, cost in self.costs.items() if _is_part(run, variant, parts)]
        return sum(runs, Cost()).over(self.steps)

    def read(self, variant: str) -> int:
        """Rows of the prompt that a token attends to."""
        rules, how = Rules(), VARIANTS[variant]
        rows = rules.held(self.tokens) if how.evicts else self.tokens
        clusters = rows // rules.page_tokens
        return rules.read(clusters) * rules.page_tokens if how.selects and rules.chooses(clusters) else rows


def mean(heard: Iterable[tuple[int, Mapping[str, Any]]], parties: int) -> dict[str, Cost]:
    """Run -> cost, from the messages of parties about runs."""
    costs = dict[str, Cost]()
    for _, said in heard:
        if "run" in said:
            cost = Cost(said["seconds"], said["bytes"], said["sends"])
            costs[said["run"]] = costs.get(said["run"], Cost()) + cost
    return {run: cost.over(parties) for run, cost in costs.items()}


def section(folder: Path | None, about: Mapping[str, str], cells: Sequence[Cell]) -> tuple[str, dict[str, Any]]:
    """The page's section and its record. Draws the picture into `folder`."""
    cells = sorted(cells, key=lambda cell: (-cell.parties, cell.protocol, cell.tokens))
    lines = [
        "## Measured",
        "",
        f"`{about['command']}`, and `--dealt` where KV was dealt · {about['machine']}; {about['versions']}",
        "",
    ]
    lines += ["### A decoded token", "", *_per_token(cells), "", "### Once a prompt", "", *_once(cells)]
    lines += ["", "### Beside the paper", "", *_beside(cells), "", PAPER_SAYS.replace("\n", " ")]
    lines += ["", "### Tokens and rows beside the run in the clear", "", *_agreement(cells)]
    if folder and cells:
        _draw(cells, folder / PICTURE)
        lines += ["", f"![Bytes and seconds of attention by prompt]({PICTURE})"]
    return "\n".join(lines), {**about, "load_average": os.getloadavg()[1], "cells": [asdict(cell) for cell in cells]}


def _beside(cells: Sequence[Cell]) -> list[str]:
    """Ratios of costs, least to largest, over prompts of a protocol that are as long as the paper's."""
    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    lines = [f"| ratio, from {PAPER_FROM} tokens on | the paper, 3 parties | 2 parties | {' | '.join(protocols)} |"]
    lines += ["|---|---|---|" + "---|" * len(protocols)]
    for what, (over, under, parts, cost), *paper in PAPER:
        ours = []
        for protocol in protocols:
            ratios = [
                cost(cell.per_token(over, parts)) / cost(cell.per_token(under, parts))
                for cell in cells
                if cell.protocol == protocol and cell.tokens >= PAPER_FROM and {over, under} <= cell.answers.keys()
            ]
            ours.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
        lines.append(f"| {' | '.join([what, *paper, *ours])} |")
    return lines


def _per_token(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| protocol | prompt | answer from | rows | attention: MB | sends | s | calculated s"
        " | full / it: MB | calculated s | whole token: MB | sends | s | full / it: MB |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for cell in cells:
        for name in cell.answers:
            part, whole = cell.per_token(name, ATTENTION), cell.per_token(name)
            row = [f"{cell.protocol}, {cell.parties}", cell.tokens, name, cell.read(name)]
            row += [*_cost(part), f"{part.linked_s:.2f}"]
            if "full" in cell.answers:
                full, all_of_it = cell.per_token("full", ATTENTION), cell.per_token("full")
                row += [f"{full.bytes / part.bytes:.2f}", f"{full.linked_s / part.linked_s:.2f}", *_cost(whole)]
                row += [f"{all_of_it.bytes / whole.bytes:.2f}"]
            else:
                row += ["", "", *_cost(whole), ""]
            lines.append(f"| {' | '.join(map(str, row))} |")
    return lines


def _once(cells: Sequence[Cell]) -> list[str]:
    lines = ["| protocol | prompt | what | MB | sends | s |", "|---|---|---|---|---|---|"]
    for cell in cells:
        if cell.dealt:
            lines.append(f"| {cell.protocol}, {cell.parties} | {cell.tokens} | prefill: in the clear, KV dealt | | | |")
        for run, cost in cell.costs.items():
            if not any(_is_part(run, name, ()) for name in cell.answers):
                lines.append(f"| {cell.protocol}, {cell.parties} | {cell.tokens} | {run} | {' | '.join(_cost(cost))} |")
    return lines


def _agreement(cells: Sequence[Cell]) -> list[str]:
    lines = ["| protocol | prompt | rows that stay, as in the clear | answer from | tokens as in the clear | text |"]
    lines += ["|---|---|---|---|---|---|"]
    for cell in cells:
        held, same = cell.kept
        for name, answer in cell.answers.items():
            kept = f"{same} of {held}" if VARIANTS[name].evicts else ""
            first = f"{answer.as_in_the_clear} of {cell.steps + 1}"
            text = answer.text.replace("`", "'").replace("|", "\\|").replace("\n", "⏎")
            lines.append(f"| {cell.protocol}, {cell.parties} | {cell.tokens} | {kept} | {name} | {first} | `{text}` |")
    return lines


def _is_part(run: str, variant: str, parts: Sequence[str]) -> bool:
    name, _, part = run.partition(": ")
    return name == variant and bool(part) and part != "bounds" and (not parts or part in parts)


def _cost(cost: Cost) -> list[str]:
    return [f"{cost.bytes / MB:.3g}", f"{cost.sends:.0f}", f"{cost.seconds:.2f}"]


def _draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw attention per token: bytes above, calculated seconds below, one column per protocol."""
    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    figure = Figure(figsize=(4.2 * len(protocols), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    for column, protocol in enumerate(protocols):
        ours = [cell for cell in cells if cell.protocol == protocol]
        top, bottom = (figure.add_subplot(2, len(protocols), column + 1 + row * len(protocols)) for row in (0, 1))
        for name in VARIANTS:
            having = [cell for cell in ours if name in cell.answers]
            costs = [cell.per_token(name, ATTENTION) for cell in having]
            lengths = [cell.tokens for cell in having]
            top.plot(lengths, [cost.bytes / MB for cost in costs], "o-", label=name)
            bottom.plot(lengths, [cost.linked_s for cost in costs], "o-", label=name)
        top.set_title(f"{protocol}, {ours[0].parties} parties", fontsize=9)
        for ax, what in ((top, "MB a party and token"), (bottom, "s a token, calculated")):
            ax.set_xscale("log", base=2)
            ax.set_ylim(bottom=0)
            ax.set_xlabel("prompt, tokens", fontsize=8)
            ax.set_ylabel(f"attention: {what}", fontsize=8)
            ax.tick_params(labelsize=7)
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=len(VARIANTS), fontsize=7)
    figure.savefig(path, dpi=90)
