"""`python -m bench.peers`: one long request against llama.cpp, and our codecs against each other.

    python -m bench.peers llama --llama-python PYTHON   the same weights through hackkv and llama.cpp, in turn
    python -m bench.peers codecs                        job completion time by stage and codec, 2k to 32k tokens

PYTHON is an interpreter with llama-cpp-python (built for this CPU), gguf and safetensors; `make peers` makes one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.peers.model import SHAPE, write_checkpoint, write_prompt
from bench.peers.ours import Run, serve
from hackkv.timing import Stage

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
KV_TYPES = ("f16", "q8_0", "q4_0")
CODECS: dict[str, dict[str, Any]] = {
    "fp16": {"name": "fp16"},
    "hack": {"name": "hack"},
    "hack-paper": {"name": "hack-paper"},
    "hack-paper, no stored sums": {"name": "hack-paper", "settings": {"stored_sums": False}},
    "hack-paper, requantizing": {"name": "hack-paper", "settings": {"open_page": "requantize"}},
}
"""Name in the table -> codec; the last two are the ablations of the paper's Fig. 13 (HACK/SE, HACK/RQE)."""

Rounds = Annotated[int, typer.Option(min=1, help="requests per cell; the median counts")]
Output = Annotated[Path | None, typer.Option(help="write the numbers here as JSON")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.callback()
def main() -> None:
    """One long request against llama.cpp, and our codecs against each other."""


@app.command()
def llama(
    llama_python: Annotated[Path, typer.Option(help="interpreter with llama-cpp-python, gguf and safetensors")],
    prompt: Annotated[int, typer.Option(min=1)] = 8192,
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Annotated[int, typer.Option(min=1, help="compute threads of each process")] = 2,
    rounds: Rounds = 3,
    output: Output = None,
) -> None:
    """Time to a whole answer: hackkv through HTTP, router and wire, llama.cpp in one process, in turn."""
    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model")
        weights, ids = Path(folder) / "model.gguf", write_prompt(Path(folder) / "prompt.json", prompt)
        _run(llama_python, HERE / "to_gguf.py", checkpoint, weights)
        ours: dict[str, list[Run]] = {"hack": [], "fp16": []}
        theirs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KV_TYPES}
        for _ in track(range(rounds), "rounds", console=console):
            for codec, runs in ours.items():
                runs += serve(checkpoint, CODECS[codec], [(prompt, tokens)], 1, threads)
            for kind, timings in theirs.items():
                said = _run(llama_python, HERE / "llama.py", weights, ids, str(tokens), str(threads), kind)
                timings.append(json.loads(said))
    table = Table("system", "JCT s", "prefill s", "ms per token", "JCT / hackkv hack")
    rows = {f"hackkv {codec}": _ours_row(runs, tokens) for codec, runs in ours.items()}
    rows |= {f"llama.cpp KV {kind}": _median_of(timings) for kind, timings in theirs.items()}
    for name, row in rows.items():
        ratio = row["jct_s"] / rows["hackkv hack"]["jct_s"]
        cells = (row["jct_s"], row["prefill_s"], 1e3 * row["per_token_s"], ratio)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    _write(output, {"prompt": prompt, "tokens": tokens, "threads": threads, "rounds": rounds, "rows": rows})


@app.command()
def codecs(
    sizes: Annotated[str, typer.Option(help="prompt lengths in tokens, comma between")] = "2048,8192,32768",
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Annotated[int, typer.Option(min=1, help="compute threads of each process")] = 2,
    rounds: Rounds = 3,
    only: Annotated[str, typer.Option(help="codecs, comma between; all by default")] = ",".join(CODECS),
    output: Output = None,
) -> None:
    """Job completion time by stage: the paper's Fig. 10 and its ablations, one request at a time."""
    lengths = [int(size) for size in sizes.split(",")]
    chosen = [name.strip() for name in only.replace("paper, ", "paper; ").split(",")]
    chosen = [name.replace(";", ",") for name in chosen]
    runs: dict[str, list[Run]] = {}
    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model")
        for name in track(chosen, "codecs", console=console):
            runs[name] = serve(checkpoint, CODECS[name], [(length, tokens) for length in lengths], rounds, threads)
    stages = [stage for stage in Stage if any(run.stages[stage] >= 0.0005 for each in runs.values() for run in each)]
    for index, length in enumerate(lengths):
        table = Table("codec", *stages, "JCT s", "wire / FP16", title=f"{length} tokens in, {tokens} out; seconds")
        for name, each in runs.items():
            run = each[index]
            spent = (f"{run.stages[stage]:.3f}" for stage in stages)
            table.add_row(name, *spent, f"{run.jct_s:.3f}", f"{run.wire_bytes / run.fp16_bytes:.3f}")
        console.print(table)
    cells = {name: dict(zip(lengths, (run.as_json() for run in each), strict=True)) for name, each in runs.items()}
    _write(output, {"tokens": tokens, "threads": threads, "rounds": rounds, "codecs": cells})


def _ours_row(runs: list[Run], tokens: int) -> dict[str, float]:
    def middle(stage: Stage) -> float:
        return median(run.stages[stage] for run in runs)

    return {
        "jct_s": median(run.jct_s for run in runs),
        "prefill_s": middle(Stage.PREFILL),
        "per_token_s": middle(Stage.DECODE) / (tokens - 1),
    }


def _median_of(timings: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(timing[name] for timing in timings) for name in ("jct_s", "prefill_s", "per_token_s")}


def _run(python: Path, *arguments: str | Path) -> str:
    done = subprocess.run([python, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    return done.stdout


def _write(output: Path | None, numbers: dict[str, Any]) -> None:
    if output is None:
        return
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    shape = f"{SHAPE.layers} layers, hidden {SHAPE.hidden}, {SHAPE.heads}/{SHAPE.kv_heads} heads x {SHAPE.head_dim}"
    result = {"machine": machine, "model": f"{shape}, FFN {SHAPE.ffn}, vocabulary {SHAPE.vocab}, BF16", **numbers}
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    app()
