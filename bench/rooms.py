"""How much of their room the pages of `kvcomp` take: `python -m bench.rooms smollm2`.

The model reads text on which none of its losses is measured. Its rows are sealed in pages of each unit, by the format's
definition. Bits are those of a code in the slices of a page. A page that needs more than its room has a larger step
than its unit says. The last column has the bits of the published form: one book for each layer, made of all of its
codes.
"""

from __future__ import annotations

import argparse

import torch
from hack_kernels.base import Planes
from hack_kernels.huffman_format import HuffmanFormat, Unit, code_lengths
from hack_kernels.reference.huffman import HuffmanReference, steps
from torch import Tensor

from hackkv.codecs.kvcomp import side_of
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.shipped import find_model
from hackkv.model.worker import load_worker
from hackkv.tokenizer import Tokenizer
from measure.calibrate.moments import read
from measure.calibrate.windows import windows_of

ROWS = (("k", Unit.BLOCK, 0.05), ("k", Unit.CHANNEL, 0.25), ("v", Unit.TOKEN, 0.15), ("v", Unit.TOKEN, 0.2))
"""(K or V, unit of values that share a step, step as a share of their range)"""
PAGE = 64
CPU = torch.device("cpu")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m bench.rooms", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="", help="checkpoint folder or hub name; default: the shipped model"
    )
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    read_pages = pages_of(args.model, args.tokens)
    pages = {name: [layer.flatten(0, 1) for layer in layers] for name, layers in read_pages.items()}
    print(
        "| rows | unit | step | room | bits a code: mean | 99% of pages | most | larger steps | a book for each layer |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, unit, scale in ROWS:
        side = side_of(unit, scale, None)
        fmt = HuffmanFormat(pages[name][0].shape[-1], side, side, PAGE)
        needed, larger = taken(fmt, name, torch.cat(pages[name]))
        most = [f"{float(each):.2f}" for each in (needed.mean(), needed.quantile(0.99), needed.max())]
        published = sum(bits_of_one_book(fmt, name, layer) for layer in pages[name]) / len(pages[name])
        words = (name, unit, scale, side.room, *most, f"{100 * larger:.1f}%", f"{published:.2f}")
        print(f"| {' | '.join(map(str, words))} |", flush=True)


def pages_of(model: str, tokens: int) -> dict[str, list[Tensor]]:
    """K and V of the whole pages of a text, by layer: [pages, Hkv, Π, D] FP16."""
    folder = find_model(model, "float32")
    worker = load_worker(ModelConfig(path=str(folder.path), dtype="float32", threads=1), CodecConfig(name="fp16"))
    layers = range(worker.layout.num_layers)
    found: dict[str, list[list[Tensor]]] = {name: [[] for _ in layers] for name in ("k", "v")}

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            whole = x[: len(x) // PAGE * PAGE].half()
            found[name][layer].append(whole.unflatten(0, (-1, PAGE)).transpose(1, 2))

    windows = windows_of(Tokenizer(folder.path), None, tokens, worker.model.spec.max_context)
    read(worker.model, windows.windows, see, lambda count: None)
    return {name: [torch.cat(layer) for layer in each] for name, each in found.items()}


def taken(fmt: HuffmanFormat, name: str, pages: Tensor) -> tuple[Tensor, float]:
    """Bits of a code in each page, and the share of pages whose step is larger than the scale ρ says."""
    kernels, side, bits, larger = HuffmanReference(fmt, CPU), fmt.side(name), list[Tensor](), 0
    for part in pages.split(256):
        planes: Planes = kernels.quantize(name, part)
        bits.append(planes[f"{name}_sizes"].sum(-1) * 8 / fmt.elements)
        wanted = steps(part.float(), side.unit, side.rungs[0])[0].flatten(1)
        larger += int((planes[f"{name}_step"].float() > wanted).any(-1).sum())
    return torch.cat(bits), larger / len(pages)


def bits_of_one_book(fmt: HuffmanFormat, name: str, pages: Tensor) -> float:
    """Bits of a code in a layer's pages, with one book made from these pages."""
    side, x = fmt.side(name), pages.float()
    step, first = steps(x, side.unit, side.rungs[0])
    seen = (torch.round(x / step) - first).long().flatten().bincount(minlength=side.symbols)
    lengths = code_lengths([max(1, count) for count in seen.tolist()])
    return float((seen * torch.tensor(lengths)).sum() / seen.sum())


if __name__ == "__main__":
    main()
