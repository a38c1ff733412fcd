"""python -m lab.frontier.summary: results as one table in Markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

KEPT: Final = Path(__file__).with_name("results.jsonl")
FP16_BYTES: Final = 256
"""Bytes of K and V per token and KV head of SmolLM2."""


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of the table, by window and bytes. A format that leaves K or V exact has no share of bytes."""
    lines = ["| format | window | tokens | bytes | KL | perplexity | top-1 |", "|---|---|---|---|---|---|---|"]
    for r in sorted(records, key=lambda r: (r["window"], r["bytes"], r["format"])):
        size = "-" if "exact" in r["format"] else f"{100 * r['bytes'] / FP16_BYTES:.1f}%"
        loss = 100 * (r["ppl"] / r["exact_ppl"] - 1)
        lines.append(
            f"| {r['format']} | {r['window']} | {r['tokens']} | {size} "
            f"| {r['kl']:.4f} | {loss:+.2f}% | {r['top1']:.3f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.frontier.summary", description=__doc__)
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FILE", help="default: those of this folder")
    args = parser.parse_args(arguments)
    print(*table(map(json.loads, args.results.read_text(encoding="utf-8").splitlines())), sep="\n")


if __name__ == "__main__":
    main()
