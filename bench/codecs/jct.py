"""Job completion times of SmolLM2, one request after the other, over links: `python -m bench.codecs jct`.

The cells of a codec share a cluster, in a network namespace whose link changes. A cell is not measured again while its
file is in the work folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.codecs.rows import MODEL, CodecRow
from bench.links.cell import Cell, Result, done, run
from bench.links.link import FREE

LINKS: Final = ("200mbit", "1gbit", FREE)
PROMPTS: Final = {"1k": 1024, "4k": 4096, "8k": 8000}
"""Name -> tokens of the prompt. 64 more are generated, and the model's context ends at 8,192."""
REQUESTS: Final = {"1k": 2, "4k": 1, "8k": 1}
"""Name of a prompt -> requests of a cell. The cells of three links repeat what a long prompt computes."""
KEPT: Final = ("mean_e2el_ms", "mean_ttft_ms", "std_e2el_ms", "completed", "failed", "link_bits_per_s", "load_average")
"""Fields of a result that a record keeps, beside stages and bytes."""

Record = dict[str, Any]
"""The record of one cell."""
Key = tuple[str, str, str]
"""(prompt, link, row)"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The cells to measure."""

    rows: Sequence[CodecRow]
    links: Sequence[str]
    prompts: Sequence[str]
    threads: int
    """Compute threads of a node."""


def measured(wanted: Wanted, work: Path) -> Iterator[dict[str, Record]]:
    """'prompt/link/row' -> record, one codec at a time. Raises `ConfigError` naming the log of a cell that failed."""
    work.mkdir(parents=True, exist_ok=True)
    for row in wanted.rows:
        cells = list(cells_of(row, wanted))
        run(cells, work)
        results = ((cell.name, done(cell, work)) for cell in cells)
        yield {name: recorded(result) for name, result in results if result is not None}


def cells_of(row: CodecRow, wanted: Wanted) -> Iterator[Cell]:
    """The cells of one row, short prompts first; the first cell warms the cluster."""
    warmups = 1
    for prompt in wanted.prompts:
        for link in wanted.links:
            yield Cell(
                prompt=prompt,
                tokens=PROMPTS[prompt],
                link=link,
                row=row.name,
                codec=row.codec,
                model=MODEL,
                threads=wanted.threads,
                requests=REQUESTS[prompt],
                warmups=warmups,
                concurrency=1,
            )
            warmups = 0


def recorded(result: Result) -> Record:
    """The record of a result: means in milliseconds, and bytes of KV on the wire."""
    means = {kind: {name: each["mean"] for name, each in result[kind].items()} for kind in ("stages", "sub_stages")}
    kv = result["kv"]
    return {
        **{name: result[name] for name in KEPT if name in result},
        **means,
        "kv_bytes": kv["bytes"] / max(1, result["completed"]),
        "kv_share": kv["ratio"],
    }


def by_key(records: Mapping[str, Record]) -> dict[Key, Record]:
    """The records with names split into (prompt, link, row)."""
    return {(prompt, link, row): record for name, record in records.items() for prompt, link, row in [name.split("/")]}
