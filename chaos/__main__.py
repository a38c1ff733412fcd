"""`python -m chaos`: bad days, played on a virtual clock."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from chaos.scenario import play
from chaos.setup import Scenario
from chaos.storm import Storm, weather
from hackkv.config import load
from hackkv.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)


@app.callback()
def main() -> None:
    """Play bad days on a virtual clock: real nodes and kernels, and a time that jumps."""


@app.command("play")
def play_files(files: Annotated[list[Path], typer.Argument(help="scenario files; see chaos/scenarios")]) -> None:
    """Play scenarios and tell the story of each; exit code 1 if one ended as it must not."""
    failed = False
    for file in files:
        try:
            scenario = load(Scenario, file)
        except ConfigError as error:
            console.print(f"[red]{error}[/red]")
            raise typer.Exit(2) from error
        console.print(f"\n[bold]{scenario.title or file.stem}[/bold]")
        report = play(scenario, lambda at_s, line: console.print(f"  {at_s:9.3f} s  {line}"))
        for line in report.wrong:
            console.print(f"  [red]wrong: {line}[/red]")
        if not report.wrong:
            console.print(f"  [green]as it must be[/green], after {report.seconds:.1f} virtual seconds")
        failed = failed or bool(report.wrong)
    raise typer.Exit(failed)


@app.command()
def storm(
    requests: Annotated[int, typer.Option(min=1)] = 10_000,
    minutes: Annotated[float, typer.Option(min=0.1, help="virtual length of the storm")] = 12.0,
    joins: Annotated[int, typer.Option(min=0)] = 248,
    leaves: Annotated[int, typer.Option(min=0)] = 149,
    wire: Annotated[str, typer.Option(help="inproc on a virtual clock; grpc, gloo on the real one")] = "inproc",
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
) -> None:
    """Thousands of requests while clients leave, frames rot and nodes come and go; exit code 1 if anything is wrong."""
    plan = Storm(requests, minutes, joins, leaves, wire=wire, seed=seed)
    logging.disable(logging.ERROR)  # a storm logs too much; its faults and endings are counted
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task("requests ended", total=requests)
        damage = weather(plan, lambda ended: bar.update(task, completed=ended))
    text = json.dumps(damage.summary(), indent=2)
    console.print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    raise typer.Exit(bool(damage.wrong))


if __name__ == "__main__":
    app()
