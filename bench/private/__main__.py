"""`python -m bench.private --python PYTHON`: a prompt and its answer under secret sharing, with and without MPCache.

The model that ships with hackkv answers under each protocol, its parties processes on loopback: party 0 owns the
prompt, party 1 the weights. PYTHON is an interpreter with what `bench/private/requirements.txt` names; `make
private` makes one and runs this. With `--out docs` the measured section of docs/private.md grows with every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from bench.private.jobs import Job, write_job
from bench.private.parties import PartyLost, addresses, run_parties
from bench.private.plain import Model
from bench.private.report import Cell, mean, section
from bench.private.session import CLIENT, OWNER, VARIANTS, Task, Values, runs
from bench.sections import read_section, write_section
from measure.accuracy.machine import this_machine

ROOT: Final = Path(__file__).resolve().parents[2]
PROTOCOLS: Final = {"ABY3": 3, "SEMI2K": 2, "CHEETAH": 2}
"""Protocol -> number of its parties."""
FRACTION_BITS: Final = 18
STRIDE: Final = 64
"""Prompts are multiples of this length, so that the rows that stay fill clusters."""

COMMAND: Final = "python -m bench.private --python PYTHON --sizes SIZES --protocols PROTOCOLS --out docs"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.command(help=__doc__)
def main(
    python: Annotated[Path, typer.Option(help="interpreter with SPU", exists=True, dir_okay=False)],
    protocols: Annotated[str, typer.Option(help="of ABY3, SEMI2K, CHEETAH, comma between")] = "ABY3,SEMI2K",
    sizes: Annotated[str, typer.Option(help="prompt lengths in tokens, comma between")] = "128,256,512,1024",
    variants: Annotated[str, typer.Option(help="comma between; all by default")] = ",".join(VARIANTS),
    tokens: Annotated[int, typer.Option(min=2, help="of an answer")] = 8,
    dealt: Annotated[
        bool, typer.Option("--dealt", help="compute the prompt in the clear, its answers only in shares")
    ] = False,
    limit: Annotated[float, typer.Option(min=1, help="seconds of silence after which a run is given up")] = 300.0,
    out: Annotated[
        Path | None,
        typer.Option(help="folder whose private.md and .json get this section", exists=True, file_okay=False),
    ] = None,
) -> None:
    """See the module."""
    chosen = _known(protocols, tuple(PROTOCOLS), "--protocols")
    names = _known(variants, tuple(VARIANTS), "--variants")
    lengths, model = _lengths(sizes), Model.shipped()
    measured = list[Cell]()
    about = {"command": COMMAND, "machine": _machine(), "versions": ""}
    for length in lengths:
        task = model.task(length, tokens, names, dealt)
        expected = model.expected(task)
        for protocol in chosen:
            try:
                cell, about["versions"] = measure(python, protocol, model, task, expected, limit)
            except PartyLost as lost:
                console.print(f"{protocol}, {length} tokens: {lost}", soft_wrap=True)
                raise typer.Exit(1) from None
            measured.append(cell)
            if out:
                write_section(out, "measured", *section(out, about, _with_recorded(out, measured)), page="private")
    typer.echo(section(None, about, measured)[0])


def measure(
    python: Path,
    protocol: str,
    model: Model,
    task: Task,
    expected: tuple[dict[str, Any], dict[str, Values]],
    limit_s: float,
) -> tuple[Cell, str]:
    """Measure one protocol and prompt; also return the versions of the libraries. Raises `PartyLost`."""
    parties = PROTOCOLS[protocol]
    with TemporaryDirectory() as name, Progress(console=console) as bar:
        folder = Path(name)
        of_owner, of_client = folder / "weights.npz", folder / "dealt.npz"
        np.savez(of_owner, allow_pickle=False, **model.weights)
        np.savez(of_client, allow_pickle=False, **expected[1])
        job = Job(0, addresses(parties), protocol, FRACTION_BITS, limit_s, task)
        paths = [folder / f"{rank}.json" for rank in range(parties)]
        for rank, path in enumerate(paths):
            own = replace(job, rank=rank, weights=str(of_owner) if rank == OWNER else None)
            if rank == CLIENT and task.dealt:
                own = replace(own, dealt=str(of_client))
            elif rank == CLIENT:
                own = replace(own, prompt=model.prompt(task.tokens))
            write_job(own, path)
        commands = [[str(python), "-m", "bench.private.party", str(path)] for path in paths]
        line = bar.add_task(f"{protocol}, {task.tokens} tokens", total=parties * runs(task))
        learned, versions, heard = dict[str, Any](), "", list[tuple[int, dict[str, Any]]]()
        with closing(run_parties(commands, limit_s, ROOT)) as saying:
            for rank, said in saying:
                heard.append((rank, said))
                versions = said.get("met", versions)
                learned = said["learned"] if rank == CLIENT and "learned" in said else learned
                if "run" in said:
                    bar.update(line, advance=1, description=f"{protocol}, {task.tokens} tokens: {said['run']}")
    answers, kept = model.compared(expected[0], learned)
    return Cell(
        protocol, parties, task.tokens, task.answer - 1, mean(heard, parties), answers, kept, task.dealt
    ), versions


def _with_recorded(out: Path, measured: Sequence[Cell]) -> list[Cell]:
    """`measured` and the cells of earlier runs; for each protocol and prompt only the last cell."""
    before = read_section(out, "measured", "private")
    cells = [*map(Cell.of, before["cells"] if before else ()), *measured]
    return list({(cell.protocol, cell.tokens): cell for cell in cells}.values())


def _known(given: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(","))
    if wrong := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{wrong[0]!r} is unknown; known: {', '.join(known)}", param_hint=option)
    return names


def _lengths(sizes: str) -> list[int]:
    words = sizes.split(",")
    if not all(word.isdecimal() and int(word) and int(word) % STRIDE == 0 for word in words):
        raise typer.BadParameter(f"{sizes!r} is not multiples of {STRIDE}, comma between", param_hint="--sizes")
    return [int(word) for word in words]


def _machine() -> str:
    machine = this_machine("cpu", 1)
    return f"{machine.cpu}, {machine.cores} cores"


if __name__ == "__main__":
    app()
