"""One cell of the experiment: a cluster behind a link, a load, and what its clients saw.

Runs as a process of its own, inside the link's namespace: `python -m bench.links.cell CELL.json`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from app.cluster import ClusterPlan, running
from bench.links.link import DECODE_HOST, behind, measure
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model

PROMPTS: Final = {"short": 300, "long": 3000}
"""Name -> tokens; the model that ships with hackkv has a context of 4,096."""
OUTPUT_TOKENS: Final = 64
WARMUPS: Final = 2
TIMEOUT_S: Final = 600.0

Result = dict[str, Any]
"""What `hackkv bench serve` writes, with `link_bits_per_s` (measured)."""


class Cell(BaseModel):
    """What is served, over what, and how much of it."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    link: str
    codec: str
    requests: int
    rate: float | None = None
    """Requests a second; None keeps `concurrency` under way."""
    concurrency: int = 0

    @property
    def name(self) -> str:
        """Prompt, link and codec."""
        return f"{self.prompt}/{self.link}/{self.codec}"


def run(cell: Cell, folder: Path) -> Result:
    """Measure a cell, or take its result from `folder` if it is there. Raises `ConfigError` naming the log."""
    stem = cell.name.replace("/", "-") + ("" if cell.rate else "-capacity")
    file, log, order = (folder / f"{stem}.{suffix}" for suffix in ("json", "log", "cell"))
    if not file.exists():
        order.write_text(cell.model_dump_json(), encoding="utf-8")
        command = behind(cell.link, [sys.executable, "-m", "bench.links.cell", str(order), str(file)])
        try:
            with log.open("wb") as out:
                subprocess.run(command, stdout=out, stderr=out, check=True, timeout=TIMEOUT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{cell.name}: {error}; see {log}") from error
    result: Result = json.loads(file.read_text(encoding="utf-8"))
    return result


async def _serve(cell: Cell, file: Path) -> int:
    """Start a cluster here and load it; the load generator's exit code."""
    model = str(find_model("").path)
    worker = {"model": {"path": model, "threads": 1}, "codec": {"name": cell.codec, "allow_loss": True}}
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model}
    # Prompts are cut from one real text and can begin alike. Prefix reuse would make times depend on the text.
    prefill, decode = {"prefix_cache": False}, {"listen": {"host": DECODE_HOST}}
    load = ("--request-rate", str(cell.rate)) if cell.rate else ("--max-concurrency", str(cell.concurrency))
    async with running(ClusterPlan(router, worker, 1, 1, prefill=prefill, decode=decode), print) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "measure.serve", "--base-url", cluster.url, "--tokenizer", model, *load),
            *("--num-prompts", str(cell.requests), "--num-warmups", str(WARMUPS), "--seed", "1"),
            *("--input-len", str(PROMPTS[cell.prompt]), "--output-len", str(OUTPUT_TOKENS), "--out", str(file)),
        )
        return await process.wait()


def main(order: Path, file: Path) -> int:
    """Measure the link, then the cell that `order` describes; returns the exit code."""
    cell = Cell.model_validate_json(order.read_bytes())
    carried = measure(cell.link)
    unfinished = file.with_suffix(".part")
    code = asyncio.run(_serve(cell, unfinished))
    if code not in (0, 1):  # 1: requests failed; the result says how many
        return code
    result = json.loads(unfinished.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**result, "link_bits_per_s": carried}), encoding="utf-8")
    unfinished.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
