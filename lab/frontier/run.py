"""python -m lab.frontier.run PATTERN: scores every format whose whole name matches, and appends JSON lines.

A result that the file has already is not computed again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from lab.frontier.calib import both
from lab.frontier.core import Model, compare
from lab.frontier.formats import formats
from lab.frontier.store import add_cache, cached, digest
from lab.frontier.texts import SCORED


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the chosen formats."""
    args = _arguments(arguments)
    torch.set_num_threads(args.threads)
    results: Path = args.results or args.cache / "results.jsonl"
    model = Model()
    chosen = [kv for kv in formats(*both(model, args.cache)) if re.fullmatch(args.pattern, kv.name)]
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    done = {(record["format"], record["window"]) for record in map(json.loads, lines)}
    for window in args.windows:
        ids = SCORED[window].ids(model.ids)
        exact = exact_states(model, ids, args.cache)
        for kv in chosen:
            if (kv.name, window) in done:
                continue
            start = time.monotonic()
            score = compare(model, ids, exact, model.hidden(ids, kv))
            size = kv.token_bytes(len(model.layers), model.d)
            record = {"format": kv.name, "window": window, "tokens": len(ids), "bytes": size, **asdict(score)}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{window:6} {kv.name:20} {size:6.2f} bytes  KL {score.kl:.4f}"
                f"  perplexity {100 * (score.ppl / score.exact_ppl - 1):+.2f}%  top-1 {score.top1:.3f}"
                f"  [{time.monotonic() - start:.0f} s]",
                flush=True,
            )


def exact_states(model: Model, ids: Tensor, cache: Path) -> Tensor:
    """Final hidden states [T, hidden] with an exact cache, kept in the folder `cache`."""
    file = cache / f"exact-{digest([ids])}.safetensors"
    return cached(file, lambda: {"hidden": model.hidden(ids)})["hidden"]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.frontier.run", description=__doc__)
    parser.add_argument("pattern", help="regular expression for names of lab/frontier/formats.py")
    parser.add_argument("--windows", nargs="+", choices=sorted(SCORED), default=["data"], metavar="NAME")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: results.jsonl in the cache")
    parser.add_argument("--threads", type=int, default=1)
    add_cache(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
