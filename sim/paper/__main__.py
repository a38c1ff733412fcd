"""`python -m sim.paper --out docs` writes paper.md; `python -m sim.paper fit` fits its parameters anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sim.paper.fit import write_fits
from sim.paper.report import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit or write; returns the exit code."""
    parser = argparse.ArgumentParser("python -m sim.paper", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("report", "fit"), default="report")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--measured",
        type=Path,
        default=Path("docs/accuracy"),
        metavar="DIR",
        help="files of `hackkv eval` for tables 6 and 7; default: %(default)s",
    )
    args = parser.parse_args(arguments)
    if args.what == "fit":
        print(write_fits().model_dump_json(indent=1))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "paper.md").write_text("\n".join(report(args.measured)).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {args.out / 'paper.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
