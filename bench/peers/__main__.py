"""`python -m bench.peers`: one long request against llama.cpp, and our codecs against each other.

    python -m bench.peers llama --llama-python PYTHON   the same weights through hackkv and llama.cpp, in turn
    python -m bench.peers codecs                        job completion time by stage and codec, 2k to 32k tokens

PYTHON is an interpreter with llama-cpp-python (built for this CPU), gguf and safetensors; `make peers` makes one and
runs both, about 15 minutes on two cores. With `--out docs` the sections of docs/performance.md grow with every result.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from bench.peers.model import write_checkpoint, write_prompt
from bench.peers.ours import Run, serve
from bench.peers.report import CODECS, Contender, Timing, about, codecs_section, peers_section
from bench.sections import write_section
from hackkv import __version__

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
LLAMA = (("f16", "flash"), ("f16", "plain"), ("q8_0", "flash"), ("q4_0", "flash"))
"""KV type and attention. llama.cpp cannot quantize V without flash attention."""
SLOW_KV = ("q8_0", "q4_0")
"""llama.cpp takes 3 and 5 times as long with these as with f16, so they run once."""
CELL_TOKENS = 24_576
"""Prompt tokens that a cell of `codecs` may cost: a long prompt runs less often, but once."""

Threads = Annotated[int, typer.Option(min=1, help="compute threads of each process")]
Rounds = Annotated[int, typer.Option(min=1, help="requests per cell at most; the median counts")]
Out = Annotated[Path | None, typer.Option(help="folder whose performance.md and .json get this section")]

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
    threads: Threads = 2,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Time to a whole answer: hackkv through HTTP, router and wire, llama.cpp in one process, in turn."""
    timings: dict[str, list[Timing]] = {}
    setting = about(f"{prompt} tokens in, {tokens} out", threads)

    def heard(system: str, timing: Timing) -> None:
        timings.setdefault(system, []).append(timing)
        console.print(f"{system}: JCT {timing.jct_s:.2f} s, prefill {timing.prefill_s:.2f} s")
        if out:
            write_section(out, "peers", *peers_section(setting, timings))

    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model")
        weights, ids = Path(folder) / "model.gguf", write_prompt(Path(folder) / "prompt.json", prompt)
        _run(llama_python, HERE / "to_gguf.py", checkpoint, weights)
        with Progress(console=console) as bar:
            for nth in bar.track(range(rounds), description="rounds"):
                for codec in ("hack", "fp16"):
                    done = partial(_ours, heard, f"hackkv {codec}", tokens)
                    serve(checkpoint, CODECS[codec].codec, [prompt], tokens, threads, done)
                for kind, attention in LLAMA:
                    if nth == 0 or kind not in SLOW_KV:
                        said = _run(
                            llama_python, HERE / "llama.py", weights, ids, str(tokens), str(threads), kind, attention
                        )
                        heard(f"llama.cpp KV {kind}, {attention}", Timing(**json.loads(said)))
    typer.echo(peers_section(setting, timings)[0])


@app.command()
def codecs(
    sizes: Annotated[str, typer.Option(help="prompt lengths in tokens, comma between")] = "2048,8192,32768",
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Threads = 2,
    rounds: Rounds = 3,
    only: Annotated[str, typer.Option(help="codecs, comma between; all by default")] = ",".join(CODECS),
    out: Out = None,
) -> None:
    """Job completion time by stage: the paper's Fig. 10 and its ablations, one request at a time."""
    lengths = [int(size) for size in sizes.split(",")]
    chosen = {name: CODECS[name] for name in only.split(",")}
    setting = about(f"{tokens} tokens out", threads)
    results: dict[int, dict[str, list[Run]]] = {length: {} for length in lengths}
    with TemporaryDirectory() as folder, Progress(console=console) as bar:
        checkpoint = write_checkpoint(Path(folder) / "model")
        prompts = {name: _prompts(contender, lengths, rounds) for name, contender in chosen.items()}
        task = bar.add_task("requests", total=sum(sum(each) for each in prompts.values()))

        def heard(name: str, prompt: int, run: Run) -> None:
            results[prompt].setdefault(name, []).append(run)
            bar.advance(task, prompt)
            console.print(f"{prompt} tokens, {name}: JCT {run.jct_s:.2f} s")
            if out:
                write_section(out, "codecs", *codecs_section(out, setting, results))

        for name, contender in chosen.items():
            serve(checkpoint, contender.codec, prompts[name], tokens, threads, partial(heard, name))
    typer.echo(codecs_section(out, setting, results)[0])


def _prompts(contender: Contender, lengths: list[int], rounds: int) -> list[int]:
    """Prompt lengths to run, short ones first, each as often as its cell may cost."""
    fitting = [length for length in lengths if length <= contender.longest]
    return [length for length in fitting for _ in range(max(1, min(rounds, CELL_TOKENS // length)))]


def _ours(heard: Callable[[str, Timing], None], system: str, tokens: int, _: int, run: Run) -> None:
    heard(system, Timing(run.jct_s, run.stages["prefill"], run.stages["decode"] / (tokens - 1), __version__))


def _run(python: Path, *arguments: str | Path) -> str:
    done = subprocess.run([python, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    return done.stdout


if __name__ == "__main__":
    app()
