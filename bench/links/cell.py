"""Cells of the experiment: a cluster of one prefill and one decode node, a link between them, a load, and its results.

Cells of the same codec, model and threads share a cluster, and its link changes from one cell to the next. They run in
a process of their own, inside a network namespace: `python -m bench.links.cell ORDERS.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, TypeAdapter

from app.cluster import ClusterPlan, running
from bench.links.link import DECODE_HOST, apart, measure, shape
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model

PROMPTS: Final = {"short": 300, "long": 3000}
"""Name -> tokens. The model that ships with hackkv has a context of 4,096."""
OUTPUT_TOKENS: Final = 64
WARMUPS: Final = 2
TIMEOUT_S: Final = 600.0
"""The most seconds of one cell."""
KV_BYTES: Final = 512 << 20
"""Of a node: room for the longest prompt in FP16, beside what an eviction notes of it."""

Result = dict[str, Any]
"""The output of `hackkv bench serve`, with `link_bits_per_s` (measured) and `load_average` before the cell."""


class Cell(BaseModel):
    """One measurement: a prompt length, a link, a codec and a load."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    """Name of the prompt's length."""
    tokens: int
    """Tokens of a prompt."""
    link: str
    row: str
    """Name of the codec with its settings."""
    codec: CodecConfig
    requests: int
    warmups: int = WARMUPS
    model: str = ""
    """As for `find_model`; empty for the model that ships with hackkv."""
    threads: int = 1
    """Compute threads of a node."""
    rate: float | None = None
    """Requests a second; None keeps `concurrency` under way."""
    concurrency: int = 0

    @property
    def name(self) -> str:
        """'prompt/link/row'."""
        return f"{self.prompt}/{self.link}/{self.row}"

    def file(self, folder: Path) -> Path:
        """The file of the cell's result in `folder`."""
        load = "" if self.rate else f"-{self.concurrency}-at-once"
        return folder / (self.name.replace("/", "-") + load + ".json")


class Orders(BaseModel):
    """Cells for one cluster, and the folder of their results."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    cells: tuple[Cell, ...]


_RESULT: Final[TypeAdapter[Result]] = TypeAdapter(Result)


def done(cell: Cell, folder: Path) -> Result | None:
    """The cell's result; None if it was not measured."""
    file = cell.file(folder)
    return _RESULT.validate_json(file.read_bytes()) if file.exists() else None


def run(cells: Sequence[Cell], folder: Path) -> None:
    """Measure the `cells` that have no result in `folder`. All cells have one codec, model and number of threads.

    Raises `ConfigError` naming the log. Results that were measured until then stay.
    """
    left = [cell for cell in cells if not cell.file(folder).exists()]
    if not left:
        return
    stem = left[0].file(folder.resolve()).with_suffix("")
    order, log = stem.with_suffix(".orders"), stem.with_suffix(".log")
    order.write_text(Orders(folder=folder.resolve(), cells=tuple(left)).model_dump_json(), encoding="utf-8")
    command = apart([sys.executable, "-m", "bench.links.cell", str(order)])
    try:
        with log.open("wb") as out:
            subprocess.run(command, stdout=out, stderr=out, check=True, timeout=TIMEOUT_S * len(left))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{left[0].name}: {error}; see {log}") from error


async def _serve(orders: Orders) -> int:
    """Start a cluster here and load it cell by cell. Returns 0; or the exit code of a load generator that failed, which
    is 1 if every request of a cell failed."""
    first = orders.cells[0]
    model = str(find_model(first.model).path)
    codec = first.codec.model_copy(update={"allow_loss": True})
    worker = {
        "kv_bytes": KV_BYTES,
        "model": {"path": model, "threads": first.threads},
        "codec": codec.model_dump(mode="json", exclude_defaults=True),
    }
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model}
    # Prompts are cut from one real text and can begin alike, and cells repeat them. Times must not depend on reused
    # prefixes.
    prefill, decode = {"prefix_cache": False}, {"prefix_cache": False, "listen": {"host": DECODE_HOST}}
    async with running(ClusterPlan(router, worker, 1, 1, prefill=prefill, decode=decode), print) as cluster:
        for cell in orders.cells:
            shape(cell.link)
            about = {"link_bits_per_s": await asyncio.to_thread(measure, cell.link), "load_average": os.getloadavg()[0]}
            file = cell.file(orders.folder)
            unfinished = file.with_suffix(".part")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "measure.serve", "--base-url", cluster.url, "--tokenizer", model),
                *_load(cell),
                *("--out", str(unfinished)),
            )
            code = await process.wait()
            if code not in (0, 1):  # 1: requests failed; the result says how many
                return code
            result = json.loads(unfinished.read_text(encoding="utf-8"))
            if not result["completed"]:
                return 1  # the reason is in the log; the unfinished result stays for whoever looks
            file.write_text(json.dumps({**result, **about}), encoding="utf-8")
            unfinished.unlink()
    return 0


def _load(cell: Cell) -> Iterable[str]:
    yield from ("--request-rate", str(cell.rate)) if cell.rate else ("--max-concurrency", str(cell.concurrency))
    yield from ("--num-prompts", str(cell.requests), "--num-warmups", str(cell.warmups), "--seed", "1")
    yield from ("--input-len", str(cell.tokens), "--output-len", str(OUTPUT_TOKENS))


if __name__ == "__main__":
    sys.exit(asyncio.run(_serve(Orders.model_validate_json(Path(sys.argv[1]).read_bytes()))))
