"""Bytes that wire forms save on real pages, and their speed: `python -m bench.wire_forms [--out docs]`.

The shipped model, or another, reads text that the shipped one was not trained on. Its pages become frames as on a
prefill node, chunk by chunk and layer by layer, and are opened as on a decode node. A speed is bytes at rest over
processor time. That time covers cutting, coding and checksums, or checksums and decoding. The best of several runs
counts. The second table sends the same frames over links of several speeds, raw, coded and as `auto` chooses.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Final

import torch
from hack_kernels.base import Planes

from bench.cluster import load_note
from bench.sections import write_section
from bench.wire_links import LINKS, link_row
from hackkv.batch import Span
from hackkv.config import CodecConfig, ModelConfig
from hackkv.expected import Expected
from hackkv.framing import FrameWriter
from hackkv.ledger import FrameLedger
from hackkv.model.runner import ModelRunner
from hackkv.model.shipped import find_model
from hackkv.model.worker import Worker, load_worker
from hackkv.packaged import SHIPPED
from hackkv.tokenizer import Tokenizer
from hackkv.types import KvFrame
from hackkv.wire_form import WIRE_FORMS, WireForm, wire_form
from measure.accuracy.machine import this_machine

TOKENS: Final = 3072
CHUNK_PAGES: Final = (8, 48)
"""Pages of a chunk. A frame holds the pages of one layer and all KV heads."""
CODECS: Final = (
    "fp16",
    "fp8",
    "mxfp4",
    "kivi-4",
    "kivi-2",
    "hack",
    "hack-k4v2",
    "hack-paper",
    "rot-k4v4",
    "rot-k2v2",
)
OVER_LINKS: Final = ("hack", "kivi-2", "fp8")
REPEATS: Final = 7


@dataclass(slots=True)
class Cost:
    """The cost of one codec's pages in one wire form."""

    raw: Counter[str] = field(default_factory=Counter)
    coded: Counter[str] = field(default_factory=Counter)
    """Bytes by plane: `raw` before coding, `coded` after it."""
    encode_s: float = float("inf")
    decode_s: float = float("inf")

    def row(self, codec: str, form: str, pages: int) -> str:
        """A line of the table."""
        raw, coded = self.raw.total(), self.coded.total()
        shrunk = {name: size for name, size in self.raw.items() if self.coded[name] < size}
        planes = ", ".join(f"{name} {self.coded[name] / size:.2f}" for name, size in shrunk.items())
        speeds = f"{raw / self.encode_s / 1e9:.2f} | {raw / self.decode_s / 1e9:.2f}"
        saved_s_per_mbit = 8e-6 * (raw - coded)
        pays = f"{saved_s_per_mbit / (self.encode_s + self.decode_s):.0f}" if coded < raw else ""
        return f"| `{codec}` | {pages} | `{form}` | {coded / raw:.3f} | {planes} | {speeds} | {pays} |"


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.wire_forms", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    parser.add_argument("--model", default="", help="checkpoint folder or hub name; default: the shipped model")
    parser.add_argument("--codecs", default=",".join(CODECS), help="presets, separated by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = find_model(args.model, "float32").path
    ids = prompt_ids(folder)
    began, lines, over = load_note(), list[str](), list[str]()
    for codec in args.codecs.split(","):
        worker = load_worker(ModelConfig(path=str(folder), threads=1), CodecConfig(name=codec))
        for pages in CHUNK_PAGES:
            sealed = list(chunks(worker, pages, ids))
            for name in WIRE_FORMS:
                lines.append(measure(worker, sealed, wire_form(name)).row(codec, name, pages))
                print(lines[-1], flush=True)
        if codec in OVER_LINKS:
            sealed = list(chunks(worker, CHUNK_PAGES[0], ids))
            for megabits in LINKS:
                over.append(link_row(codec, megabits, worker, sealed, TOKENS))
                print(over[-1], flush=True)
    if args.out:
        where = f"{this_machine('', 1).cpu}, {began}"
        write_section(
            args.out, "wire-forms", section(where, lines, over), {"where": where, "rows": lines, "links": over}
        )


def section(where: str, lines: list[str], over: list[str]) -> str:
    """The section of performance.md."""
    about = f"`python -m bench.wire_forms --out docs` · hackkv-small, {TOKENS} tokens of held-out text; {where}"
    notes = (
        "Speeds are bytes at rest over the processor time of everything that is done to them: cutting, coding and "
        "checksums; checksums and decoding. A frame holds a layer's pages of one chunk, of two KV heads; models with "
        "more heads have larger frames, which are faster. Planes that are not named travel as they rest. Coding takes "
        "less time, on both sides together, than it saves on a link below so many Mbit/s."
    )
    links = (
        "The same pages in chunks of 8, over a link that is paced by sleeping: milliseconds from the first byte until "
        "all is decoded, and megabytes sent; the best of 3. `auto` has measured the link with one handoff before. "
        "Encoding, the link and decoding overlap, each on a thread of its own."
    )
    head = (
        "| codec | chunk, pages | wire form | bytes, of raw | by plane | encode, GB/s | decode, GB/s | pays below |",
        "|---|---|---|---|---|---|---|---|",
    )
    table = ("| codec | link, Mbit/s | `raw` | `zstd` | `auto` |", "|---|---|---|---|---|", *over)
    return "\n".join(("## Wire forms", "", about, "", notes, "", *head, *lines, "", links, "", *table))


def chunks(worker: Worker, pages: int, ids: Sequence[int]) -> Iterator[tuple[int, int, Planes]]:
    """(layer, first page, planes that travel) of every chunk of a prompt, as a prefill node exports them."""
    page_tokens = worker.layout.page_tokens
    all_pages = tuple(range(TOKENS // page_tokens))
    runner = ModelRunner(worker.model, worker.codec, len(all_pages), 1)
    with torch.inference_mode():
        for start in range(0, TOKENS, pages * page_tokens):
            count = min(pages * page_tokens, TOKENS - start)
            runner.forward([Span(0, start, count, all_pages)], ids[start : start + count], wanted=[0])
    for first in range(0, len(all_pages), pages):
        for layer in range(worker.layout.num_layers):
            for leaving in runner.memory.export(layer, all_pages[first : first + pages]):
                yield layer, first + leaving.first, leaving.own()


def prompt_ids(folder: Path) -> list[int]:
    """The beginning of text that the shipped model was not trained on, in tokens of the model in `folder`."""
    lines = (SHIPPED / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["text"] for line in lines)
    ids = Tokenizer(folder).encode(text[: 12 * TOKENS])
    return list(ids[:TOKENS])


def measure(worker: Worker, sealed: list[tuple[int, int, Planes]], form: WireForm) -> Cost:
    """Encode and decode the frames of all chunks, `REPEATS` times."""
    cost = Cost()
    for _ in range(REPEATS):
        writer = FrameWriter("bench", 0, form)
        began = thread_time()
        frames = [frame for layer, first, planes in sealed for frame in writer.frames(layer, first, [planes])]
        cost.encode_s = min(cost.encode_s, thread_time() - began)
        cost.decode_s = min(cost.decode_s, open_all(worker, frames, form))
    for frame in frames:
        for span in frame.planes:
            cost.raw[span.name] += span.raw_bytes
            cost.coded[span.name] += span.coded_bytes
    return cost


def open_all(worker: Worker, frames: list[KvFrame], form: WireForm) -> float:
    """Processor seconds to verify and decode `frames`."""
    expected = Expected(worker.layout, worker.codec.wire_planes, TOKENS, worker.footprint, form)
    ledger = FrameLedger("bench", 0, expected)
    began = thread_time()
    for frame in frames:
        ledger.accept(frame)
    return thread_time() - began


if __name__ == "__main__":
    main()
