"""`python -m bench.peers`: one long request against llama.cpp, and our codecs against each other.

    python -m bench.peers llama --llama-python PYTHON   the same weights through hackkv and llama.cpp, in turn
    python -m bench.peers codecs                        job completion time by stage and codec, 2k to 32k tokens
    python -m bench.peers smollm2 --peer-python PYTHON  SmolLM2 with equal weights through hackkv and llama.cpp, in turn
    python -m bench.peers together --peer-python PYTHON the same, several requests at once

PYTHON is an interpreter with llama-cpp-python (built for this CPU), gguf and safetensors; `make peers` makes one and
runs the first two, about 20 minutes on two cores. For the others it is one with the wheel `xllamacpp`. With
`--out docs` the sections of docs/performance.md grow with every result.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from hack_kernels.cpu import ISA_VARIABLE
from hack_kernels.cpu.extension import supported_isas
from rich.console import Console
from rich.progress import Progress

from bench.peers.model import SHAPE, prompt_ids, write_checkpoint, write_prompt
from bench.peers.ours import Run, serve, serve_together
from bench.peers.report import (
    CODECS,
    Timing,
    about,
    codecs_section,
    peers_section,
    smollm2_section,
    together_section,
)
from bench.sections import write_section
from hackkv import __version__
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.shipped import find_model
from hackkv.model.shipped import smollm2 as smollm2_file

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
LLAMA = (("f16", "flash"), ("f16", "plain"), ("q8_0", "flash"), ("q4_0", "flash"))
"""KV type and attention. llama.cpp cannot quantize V without flash attention."""
SLOW_KV = ("q8_0", "q4_0")
"""llama.cpp takes 3 and 5 times as long with these as with f16, so they run once."""
CELL_TOKENS = 24_576
"""Prompt tokens that a cell of `codecs` may cost. A long prompt runs less often, but at least once."""

LLAMA_PYTHON = typer.Option(help="interpreter with llama-cpp-python, gguf and safetensors", exists=True, dir_okay=False)
Threads = Annotated[int, typer.Option(min=1, help="compute threads of each process")]
Rounds = Annotated[int, typer.Option(min=1, help="requests per cell at most; the median counts")]
Out = Annotated[
    Path | None,
    typer.Option(help="folder whose performance.md and .json get this section", exists=True, file_okay=False),
]

PEER_PYTHON = typer.Option(help="interpreter with xllamacpp", exists=True, dir_okay=False)
Heard = Callable[[str, int, Timing], None]
"""Told the system, the prompt's length and what it took."""

app = typer.Typer(
    help="One long request against llama.cpp, and our codecs against each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


@app.command()
def llama(
    llama_python: Annotated[Path, LLAMA_PYTHON],
    prompt: Annotated[int, typer.Option(min=1)] = 8192,
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Threads = 2,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Time to a whole answer: hackkv through HTTP, router and wire, llama.cpp in one process, in turn."""
    timings: dict[str, list[Timing]] = {}
    setting = about(f"{prompt} tokens in, {tokens} out", threads)

    def heard(system: str, _: int, timing: Timing) -> None:
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
                    serve(checkpoint, CODECS[codec], [prompt], tokens, threads, done)
                for kind, attention in LLAMA:
                    if nth == 0 or kind not in SLOW_KV:
                        said = _run(
                            llama_python, HERE / "llama.py", weights, ids, str(tokens), str(threads), kind, attention
                        )
                        heard(f"llama.cpp KV {kind}, {attention}", prompt, Timing(**json.loads(said)))
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
    """Job completion time by stage: the paper's Fig. 10 and its ablations, one request at a time, codecs in turn."""
    lengths, names = _lengths(sizes, tokens), _names(only)
    setting = about(f"{tokens} tokens out", threads)
    results: dict[int, dict[str, list[Run]]] = {length: {} for length in lengths}
    with TemporaryDirectory() as folder, Progress(console=console) as bar:
        checkpoint = write_checkpoint(Path(folder) / "model")
        by_round = [_prompts(lengths, nth) for nth in range(rounds)]
        task = bar.add_task("requests", total=len(names) * sum(map(sum, by_round)))

        def heard(name: str, prompt: int, run: Run) -> None:
            results[prompt].setdefault(name, []).append(run)
            bar.advance(task, prompt)
            console.print(f"{prompt} tokens, {name}: JCT {run.jct_s:.2f} s")
            if out:
                write_section(out, "codecs", *codecs_section(out, setting, results))

        for prompts in filter(None, by_round):
            for name in names:
                serve(checkpoint, CODECS[name], prompts, tokens, threads, partial(heard, name))
    typer.echo(codecs_section(out, setting, results)[0])


@app.command()
def smollm2(
    peer_python: Annotated[Path, PEER_PYTHON],
    sizes: Annotated[str, typer.Option(help="prompt lengths in tokens, comma between")] = "512,2048,4096",
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Threads = 2,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """SmolLM2's GGUF file, weights of 4 and 8 bits as they are: prefill and decode by prompt length."""
    lengths, timings = _lengths(sizes, tokens), dict[tuple[str, int], list[Timing]]()
    file, isa = smollm2_file(), os.environ.get(ISA_VARIABLE) or supported_isas()[0]
    setting = about(f"{tokens} tokens out", threads) | {"model": file.stem, "kernels": isa}

    def heard(system: str, length: int, timing: Timing) -> None:
        timings.setdefault((system, length), []).append(timing)
        console.print(f"{system}, {length} tokens: prefill {timing.prefill_s:.2f} s, {1e3 * timing.per_token_s:.2f} ms")

    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps([prompt_ids(length) for length in lengths]), encoding="utf-8")
        for _ in range(rounds):
            for weights in ("auto", "bf16"):
                checkpoint = find_model(str(file), "bfloat16", weights).path
                for name in ("fp16", DEFAULT_CODEC):
                    done = partial(_ours, heard, f"hackkv {__version__}, weights {weights}, KV {name}", tokens)
                    serve(checkpoint, {"name": name}, lengths, tokens, threads, done)
            said = _run(peer_python, HERE / "xllama.py", file, prompts, str(tokens), str(threads))
            for length, line in zip(lengths, said.splitlines(), strict=True):
                timing = Timing(**json.loads(line))
                heard(f"llama.cpp (xllamacpp {timing.version}), KV f16", length, timing)
    text, record = smollm2_section(setting, timings)
    if out:
        write_section(out, f"smollm2-{isa}", text, record)
    typer.echo(text)


@app.command()
def together(
    peer_python: Annotated[Path, PEER_PYTHON],
    count: Annotated[int, typer.Option(min=2, help="requests at once")] = 8,
    prompt: Annotated[
        int, typer.Option(min=64, help="tokens of the longest prompt; the others have a few less")
    ] = 4096,
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Threads = 2,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """SmolLM2's GGUF file: seconds until the last of several requests has its last token."""
    file, isa = smollm2_file(), os.environ.get(ISA_VARIABLE) or supported_isas()[0]
    lengths, seconds = [prompt - nth for nth in range(count)], dict[str, list[float]]()
    setting = about(f"{tokens} tokens out", threads) | {"model": file.stem, "kernels": isa}
    checkpoint = find_model(str(file), "bfloat16", "auto").path

    def heard(system: str, took_s: float) -> None:
        seconds.setdefault(system, []).append(took_s)
        console.print(f"{system}: {took_s:.1f} s")

    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps([prompt_ids(length) for length in lengths]), encoding="utf-8")
        for _ in range(rounds):
            for name in ("fp16", DEFAULT_CODEC):
                took_s = serve_together(checkpoint, {"name": name}, lengths, tokens, threads)
                heard(f"hackkv {__version__}, KV {name}", took_s)
            said = json.loads(
                _run(peer_python, HERE / "xllama.py", file, prompts, str(tokens), str(threads), "together")
            )
            heard(f"llama.cpp (xllamacpp {said['version']}), KV f16", said["seconds"])
    text, record = together_section(setting, count, prompt, seconds)
    if out:
        write_section(out, f"together-{isa}", text, record)
    typer.echo(text)


def _lengths(sizes: str, tokens: int) -> list[int]:
    """Prompt lengths that the model has room for, with `tokens` after them."""
    most = SHAPE.max_context - tokens
    words = sizes.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise typer.BadParameter(f"{sizes!r} is not numbers from 1 to {most}, comma between", param_hint="--sizes")
    return [int(word) for word in words]


def _names(only: str) -> list[str]:
    names = only.split(",")
    if unknown := [name for name in names if name not in CODECS]:
        known = ", ".join(CODECS)
        raise typer.BadParameter(f"{', '.join(map(repr, unknown))} unknown; known: {known}", param_hint="--only")
    return names


def _prompts(lengths: list[int], nth: int) -> list[int]:
    """Prompt lengths of the nth round. A cell runs once, and again while it costs no more than CELL_TOKENS."""
    return [length for length in lengths if nth == 0 or (nth + 1) * length <= CELL_TOKENS]


def _ours(heard: Heard, system: str, tokens: int, length: int, run: Run) -> None:
    timing = Timing(run.jct_s, run.stages["prefill"], run.stages["decode"] / (tokens - 1), __version__)
    heard(system, length, timing)


def _run(python: Path, *arguments: str | Path) -> str:
    done = subprocess.run([python, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    return done.stdout


if __name__ == "__main__":
    app()
