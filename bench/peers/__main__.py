"""`python -m bench.peers`: hackkv beside other engines, and our codecs against each other.

    python -m bench.peers beside              SmolLM2 through hackkv and every peer of `bench/peers/table.py`
    python -m bench.peers beside --isa avx2   the same, every process held to AVX2's instructions
    python -m bench.peers llama               a long prompt, random weights of BF16: hackkv and llama.cpp, in turn
    python -m bench.peers codecs              job completion time by stage and codec, 2k to 32k tokens

`make peers` installs the peers into `.venv-peers`, each into an environment of its own, and runs these. With
`--out docs` the sections of docs/performance.md grow with every result.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated

import typer
from hack_kernels.cpu.extension import supported_isas
from rich.console import Console
from rich.progress import Progress

from bench.peers.beside import ANSWER_TOKENS, HELD, Record, section
from bench.peers.model import SHAPE, prompt_ids, text_prompts, write_checkpoint, write_split
from bench.peers.ours import Run, serve
from bench.peers.process import FORMS, Absent, compile_hold, python_of, run
from bench.peers.report import CODECS, Timing, about, codecs_section, peers_section
from bench.peers.systems.child import Job
from bench.peers.table import ENTRIES, NATIVE, Entry
from bench.sections import read_section, write_section
from hackkv import __version__
from hackkv.model.shipped import find_model
from hackkv.model.shipped import smollm2 as smollm2_file

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
ALONE_S, TOGETHER_S = 200.0, 480.0
"""The longest time of a process of `beside`, for prompts alone and together."""
SLOW_KV = ("q8_0", "q4_0")
"""KV types with which llama.cpp takes 3 and 5 times as long as with f16. `llama` runs them once."""
LLAMA = ("f16", "f16-plain", *SLOW_KV)
CELL_TOKENS = 24_576
"""The most prompt tokens of a cell of `codecs`. A long prompt runs less often, but at least once."""
MODULES = ",".join(entry.module for entry in ENTRIES)


class Isa(StrEnum):
    """The instruction set to which `beside` holds every process."""

    BEST = "best"
    AVX2 = "avx2"


Threads = Annotated[int, typer.Option(min=1, help="compute threads of each process")]
Rounds = Annotated[int, typer.Option(min=1, help="requests per cell at most; the median counts")]
Out = Annotated[
    Path | None,
    typer.Option(help="folder whose performance.md and .json get this section", exists=True, file_okay=False),
]

Heard = Callable[[str, int, Timing], None]
"""Called with the system, the length of the prompt, and the times."""

app = typer.Typer(
    help="hackkv beside other engines, and our codecs against each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


@app.command()
def llama(
    prompt: Annotated[int, typer.Option(min=1)] = 8192,
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    threads: Threads = 2,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Time to a whole answer: hackkv through HTTP, router and wire, llama.cpp in one process, in turn."""
    timings: dict[str, list[Timing]] = {}
    setting = about(f"{prompt} tokens in, {tokens} out", threads)
    try:
        python = python_of(NATIVE)
    except Absent as error:
        raise typer.BadParameter(f"{NATIVE.name}: {error}") from None

    def heard(system: str, _: int, timing: Timing) -> None:
        timings.setdefault(system, []).append(timing)
        console.print(f"{system}: JCT {timing.jct_s:.2f} s, prefill {timing.prefill_s:.2f} s")
        if out:
            write_section(out, "peers", *peers_section(setting, timings))

    with TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model")
        weights, ids = Path(folder) / "model.gguf", [prompt_ids(prompt)]
        subprocess.run([python, HERE / "to_gguf.py", checkpoint, weights], check=True, timeout=TIMEOUT_S)
        with Progress(console=console) as bar:
            for nth in bar.track(range(rounds), description="rounds"):
                for codec in ("hack", "fp16"):
                    done = partial(_ours, heard, f"hackkv {codec}", tokens)
                    serve(checkpoint, CODECS[codec], ids, tokens, threads, done)
                for kv in LLAMA:
                    if nth == 0 or kv not in SLOW_KV:
                        job = Job(str(weights), "", "", kv, threads, tokens, ids, together=False)
                        result = run(NATIVE, job, None, TIMEOUT_S)
                        [took] = result.answers
                        jct_s, per_token_s = took.prefill_s + took.decode_s, took.decode_s / (tokens - 1)
                        heard(f"llama.cpp KV {kv}", prompt, Timing(jct_s, took.prefill_s, per_token_s, result.version))
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
    lengths, names = _lengths(sizes, tokens), _known(only, CODECS)
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
                ids = [prompt_ids(prompt) for prompt in prompts]
                serve(checkpoint, CODECS[name], ids, tokens, threads, partial(heard, name))
    typer.echo(codecs_section(out, setting, results)[0])


@app.command()
def beside(
    isa: Annotated[Isa, typer.Option(help="instruction set that every process is held to")] = Isa.BEST,
    minutes: Annotated[float, typer.Option(min=0, help="begin nothing after so long; the same command goes on")] = 8.0,
    only: Annotated[str, typer.Option(help="modules of bench.peers.systems, comma between; all by default")] = MODULES,
    sizes: Annotated[str, typer.Option(help="prompt lengths in tokens, comma between")] = "512,2048,4096",
    count: Annotated[int, typer.Option(min=2, help="requests at once, of the greatest length")] = 8,
    contenders: Annotated[int, typer.Option(min=0, help="peers asked for these: the fastest ones alone")] = 2,
    threads: Threads = 2,
    rounds: Annotated[int, typer.Option(min=1, help="times that each is asked; medians count")] = 1,
    out: Out = None,
) -> None:
    """SmolLM2's GGUF file and the same text through hackkv and its peers: each prompt alone, then several at once.

    What the section in `--out` holds of the same setting is not measured again, and what failed not tried again. To
    begin anew, delete the section from performance.json.
    """
    file, lengths, entries = smollm2_file(), sorted(_lengths(sizes, ANSWER_TOKENS)), _entries(only)
    checkpoint = write_split(find_model(str(file), "bfloat16", "bf16").path, FORMS / file.stem)
    prompts = {False: text_prompts(checkpoint, lengths), True: text_prompts(checkpoint, lengths[-1:] * count)}
    with TemporaryDirectory() as folder:
        hold = _hold(isa, Path(folder))
        kernels = str(isa) if hold else supported_isas()[0]
        setting = about(f"{sizes} tokens of text in, {ANSWER_TOKENS} out", threads)
        setting |= {"model": file.stem, "kernels": kernels, "held": HELD if hold else "", "at once": count}
        name = f"smollm2-{kernels}"
        record = Record.read(read_section(out, name) if out else None, setting, lengths)
        until = monotonic() + 60 * minutes
        while monotonic() < until and (part := next(record.left(entries, rounds, contenders), None)):
            asked = prompts[part.together]
            job = Job(str(file), str(checkpoint), str(FORMS), part.kv, threads, ANSWER_TOKENS, asked, part.together)
            try:
                record.add(part, run(part.entry, job, hold, TOGETHER_S if part.together else ALONE_S))
                console.print(f"{part.key}: done")
            except Absent as error:
                record.absent[part.key] = str(error)
                console.print(f"{part.key}: not measured: {error}")
            if out:
                write_section(out, name, section(record, ENTRIES, os.getloadavg()[1]), record.as_json())
    typer.echo(section(record, ENTRIES, os.getloadavg()[1]))
    left = ", ".join(part.key for part in record.left(entries, rounds, contenders))
    typer.echo(f"\nLeft, for the same command again: {left}" if left else "\nNothing is left to measure.")


def _hold(isa: Isa, folder: Path) -> Path | None:
    """A library that holds processes to `isa`; None if this processor has no newer instructions anyway."""
    if isa is Isa.BEST or supported_isas()[0] == isa:
        return None
    try:
        return compile_hold(folder)
    except Absent as error:
        raise typer.BadParameter(str(error), param_hint="--isa") from None


def _entries(only: str) -> list[Entry]:
    by_module = {entry.module: entry for entry in ENTRIES}
    return [by_module[name] for name in _known(only, by_module)]


def _lengths(sizes: str, tokens: int) -> list[int]:
    """Prompt lengths for which the model has room, with `tokens` tokens after each. Raises `typer.BadParameter`."""
    most = SHAPE.max_context - tokens
    words = sizes.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise typer.BadParameter(f"{sizes!r} is not numbers from 1 to {most}, comma between", param_hint="--sizes")
    return [int(word) for word in words]


def _known(only: str, known: Collection[str]) -> list[str]:
    names = only.split(",")
    if unknown := [name for name in names if name not in known]:
        said = f"{', '.join(map(repr, unknown))} unknown; known: {', '.join(known)}"
        raise typer.BadParameter(said, param_hint="--only")
    return names


def _prompts(lengths: list[int], nth: int) -> list[int]:
    """Prompt lengths of the nth round. A length runs once, and again while its runs take at most CELL_TOKENS tokens."""
    return [length for length in lengths if nth == 0 or (nth + 1) * length <= CELL_TOKENS]


def _ours(heard: Heard, system: str, tokens: int, length: int, run: Run) -> None:
    timing = Timing(run.jct_s, run.stages["prefill"], run.stages["decode"] / (tokens - 1), __version__)
    heard(system, length, timing)


if __name__ == "__main__":
    app()
