"""`python -m bench.rounding smollm2 [--out docs]`: the cost of rounding the rows that packed weights multiply.

The same weights multiply rows in five ways: in FP32 throughout, which is exact; in BF16, with rows as they come and
weights unpacked for the library; by our kernels, which round blocks to two bytes or to one; with all blocks rounded to
two bytes; and with all blocks rounded to one byte, as in llama.cpp.
Attention is exact. The text is the held-out text of `hackkv eval`: beginnings of its longest documents. KL is taken
from the exact predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from hack_kernels.block_weight import BLOCK as COLUMNS
from hack_kernels.block_weight import LARGEST, LARGEST_DIGIT, BlockWeight, Weight, as_numbers, rounded_to
from hack_kernels.rowwise import Rowwise
from torch import Tensor

from bench.cluster import load_note
from bench.sections import write_section
from hackkv.config import ModelConfig
from hackkv.model.exact import ExactKv, advance
from hackkv.model.llama import Llama
from measure.accuracy.machine import this_machine
from measure.accuracy.stats import perplexity, ratio
from measure.accuracy.subject import load_subject
from measure.tasks import Ids, join

TOKENS: Final = 1024
BLOCK: Final = 128
"""Scores are means over so many tokens; the bootstrap draws these means."""
HEAD: Final = "| rows | perplexity | beside exact | KL from exact, nats | first choices kept |"


class Unrounded(Rowwise):
    """The library's products, with weights unpacked to the rows' dtype."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Multiply with weights that are unpacked for each call."""
        return F.linear(x, as_numbers(weight).to(x.dtype), bias)


class Rounded(Rowwise):
    """Products with every block of a row rounded alike, by the definition: its largest value becomes `levels`."""

    def __init__(self, levels: int) -> None:
        self._levels = float(levels)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Multiply. Rows are rounded only if the weights are packed."""
        if not isinstance(weight, BlockWeight):
            return super().product(x, weight, bias)
        bias = None if bias is None else bias.float()
        levels = torch.full((x.shape[0], x.shape[1] // COLUMNS), self._levels)
        return F.linear(rounded_to(x, levels), as_numbers(weight).float(), bias).to(x.dtype)


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.rounding", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="as for hackkv serve")
    parser.add_argument("--weights", default="auto", help="as for hackkv serve")
    parser.add_argument("--windows", type=int, default=8, help=f"documents, of {TOKENS} tokens each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    config = ModelConfig(
        path=args.model, dtype="bfloat16", weights=args.weights, threads=args.threads, batch_invariant=True
    )  # batch_invariant makes our kernels, which are measured, multiply any number of rows
    subject, began = load_subject(config), load_note()
    model = subject.worker.model
    if not model.weights.packed_bits:
        parser.error(f"{args.model} has no packed weights with --weights {args.weights}")
    documents = sorted(subject.documents, key=lambda document: -len(document.text))[: args.windows]
    windows = [join(subject.prefix, subject.encode(document.text))[:TOKENS] for document in documents]
    lines = list(table(model, windows))
    form = " and ".join(f"{bits} bits" for bits in sorted(model.weights.packed_bits))
    machine = this_machine("", args.threads)
    where = f"{machine.cpu}, {args.threads} threads, {began}; {subject.worker.name}, weights in {form}"
    about = f"`python -m bench.rounding {args.model} --out docs` · {where}; {len(windows)} windows of {TOKENS} tokens"
    text = "\n".join(("## Rows that meet packed weights", "", about, "", HEAD, "|" + "---|" * 5, *lines))
    print(text)
    if args.out:
        write_section(args.out, "rounding", text, {"where": where, "rows": lines})


def table(model: Llama, windows: list[Ids]) -> Iterator[str]:
    """A line of the table for each way."""
    exact = Llama(model.spec, _in_float32(model.weights), kernels=Unrounded())
    ways = {
        "in FP32, exact": exact,
        "as they come, in BF16": Llama(model.spec, model.weights, kernels=Unrounded()),
        "blocks in one byte or two, as here": model,
        "blocks in two bytes": Llama(model.spec, model.weights, kernels=Rounded(LARGEST)),
        "blocks in one byte": Llama(model.spec, model.weights, kernels=Rounded(LARGEST_DIGIT)),
    }
    scores: dict[str, list[Tensor]] = {name: [] for name in ways}
    for window in windows:
        wanted = predictions(exact, window)
        for name, way in ways.items():
            scores[name] += scored(wanted if way is exact else predictions(way, window), wanted, window)
    of = {name: torch.stack(blocks).double().numpy() for name, blocks in scores.items()}  # [blocks, 3]
    nats_of_exact = next(iter(of.values()))[:, 0]
    for name, each in of.items():
        nats, kl, kept = each.T
        apart = ratio(nats, nats_of_exact)
        more = f"{100 * apart.value:+.3f} % [{100 * apart.low:+.3f}, {100 * apart.high:+.3f}]"
        yield f"| {name} | {perplexity(nats).value:.3f} | {more} | {kl.mean():.5f} | {100 * kept.mean():.2f} % |"


@torch.inference_mode()
def predictions(model: Llama, window: Ids) -> Tensor:
    """Log-probabilities [T, vocab] after each token."""
    return F.log_softmax(model.logits(advance(model, [(ExactKv(), window.tolist())])).float(), -1)


def scored(found: Tensor, wanted: Tensor, window: Ids) -> list[Tensor]:
    """Scores [3] of each block of tokens that have a successor: nats per token, KL, share of first choices kept."""
    nats = -found[:-1].gather(1, torch.from_numpy(window[1:])[:, None])[:, 0]
    kl = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)[:-1]
    kept = (found.argmax(-1) == wanted.argmax(-1)).float()[:-1]
    return [block.mean(1) for block in torch.stack((nats, kl, kept)).split(BLOCK, 1)]


def _in_float32(value: Any) -> Any:
    """A tree of dataclasses with its tensors and packed weights as FP32."""
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if isinstance(value, Tensor):
        return value.float()
    if is_dataclass(value) and hasattr(value, "unpacked"):
        return as_numbers(value)  # type: ignore[arg-type]
    if is_dataclass(value):
        return replace(value, **{each.name: _in_float32(getattr(value, each.name)) for each in fields(value)})  # type: ignore[type-var]
    return value


if __name__ == "__main__":
    main()
