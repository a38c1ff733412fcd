"""The subcommands of `hackkv`. The code of a command is imported when it runs, so that help appears at once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from app.roles import ENVIRONMENT, ROLES
from hackkv import __version__
from hackkv.defaults import DEFAULT_CODEC
from hackkv.packaged import SMOLLM2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Disaggregated LLM serving on a 2-bit KV cache.",
)
SERVING = "app.serving"
"""The module of `serve` and `demo`."""

_MODEL = "Checkpoint folder, GGUF file, hub name or smollm2; nothing serves the model that ships along."
Model = Annotated[str, typer.Argument(help=_MODEL)]
DemoModel = Annotated[str, typer.Option("--model", help=_MODEL)]
Prefill = Annotated[int, typer.Option("--prefill", min=1, help="Prefill processes.")]
Decode = Annotated[int, typer.Option("--decode", min=1, help="Decode processes.")]
Codec = Annotated[
    str,
    typer.Option(
        help="Form of the KV cache; 'hackkv eval --recommend MODEL' compares all of them. With ',allow_loss' after it, "
        "it serves even if it spoils the model's answers; with ',calibration=FILE' it uses a file that "
        "'hackkv calibrate' wrote for this model."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="What products are computed in: bfloat16 or float32. With ',int8' or ',int4' after it, weights rest as "
        "codes of so many bits (model.weights)."
    ),
]
Device = Annotated[
    str,
    typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU if one can be used. With several GPUs, nodes take turns."),
]
Host = Annotated[str, typer.Option(help="Address of the HTTP API.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 takes any free one.")]
Context = Annotated[int, typer.Option(min=0, help="Longest prompt plus output in tokens; 0 is the model's own limit.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File with API keys, one a line.")]
RouterWorkers = Annotated[int, typer.Option(min=1, help="Processes that serve the HTTP API.")]
Name = Annotated[str, typer.Option("--served-model-name", help="Name that clients use; default: the folder's name.")]

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For a command whose arguments, `--help` included, another program parses."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hackkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before a command."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The arguments and options of `hackkv serve`."""

    model: Model = ""
    prefill: Prefill = 2
    decode: Decode = 2
    codec: Codec = DEFAULT_CODEC
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    host: Host = "127.0.0.1"
    port: Port = 8000
    max_context: Context = 0
    api_key_file: ApiKeyFile = None
    served_model_name: Name = ""
    router_workers: RouterWorkers = 1


def serve(**told: Any) -> None:
    """Run a whole cluster on this machine until Ctrl-C."""
    given = ServeOptions(**told)
    router: dict[str, Any] = {
        "listen": {"host": given.host, "port": given.port},
        "served_model_name": given.served_model_name,
        "workers": given.router_workers,
    }
    if given.api_key_file:
        router["api_key_file"] = str(given.api_key_file)
    dtype, _, weights = given.dtype.partition(",")
    model = {
        "path": given.model,
        "dtype": dtype,
        "weights": weights or "auto",
        "device": given.device,
        "max_context": given.max_context,
    }
    raise typer.Exit(import_module(SERVING).serve(model, given.codec, (given.prefill, given.decode), router))


serve.__signature__ = signature(ServeOptions, eval_str=True)  # type: ignore[attr-defined]  # typer makes options of it
app.command()(serve)


@app.command()
def demo(
    model: DemoModel = SMOLLM2,
    prefill: Prefill = 2,
    decode: Decode = 2,
    codec: Codec = DEFAULT_CODEC,
) -> None:
    """Start a cluster, send it real requests, show where their time went, and stop."""
    raise typer.Exit(import_module(SERVING).demo({"path": model}, codec, (prefill, decode)))


def _role(role: str) -> None:
    @app.command(
        role,
        help=f"Run one {role} process: --config FILE [--set key=value ...].",
        context_settings=_PASSED_ON,
    )
    def run(context: typer.Context) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        raise typer.Exit(import_module(ROLES[role]).main(context.args))


for _name in ROLES:
    _role(_name)


@app.command(
    "eval",
    help="Measure what every codec costs in accuracy, and write a report; --help lists rows and tasks.",
    context_settings=_PASSED_ON,
)
def evaluate(context: typer.Context) -> None:
    _become("measure.accuracy", context.args, "matplotlib", "rapidfuzz", "rouge_score")


@app.command(
    "calibrate",
    help="Fit a family of codecs to a model, and write a calibration file; --help lists families and options.",
    context_settings=_PASSED_ON,
)
def calibrate(context: typer.Context) -> None:
    _become("measure.calibrate", context.args)


@app.command(
    "simulate", help="Run a cluster that nobody has bought yet; --help lists the options.", context_settings=_PASSED_ON
)
def simulate(context: typer.Context) -> None:
    _become("sim.simulate", context.args)


@app.command(
    "plan",
    help="What to buy: prefill-to-decode ratio, GPU kinds, codec, cost for an objective; --help lists the options.",
    context_settings=_PASSED_ON,
)
def plan(context: typer.Context) -> None:
    _become("sim.plan", context.args)


bench = typer.Typer(no_args_is_help=True, help="Measure a running server.")
app.add_typer(bench, name="bench")


@bench.command(
    "serve", help="Send any OpenAI-style server a load; --help lists the options.", context_settings=_PASSED_ON
)
def bench_serve(context: typer.Context) -> None:
    _become("measure.serve", context.args)


@bench.command("plot", help="Job completion time by stage of several runs, side by side.", context_settings=_PASSED_ON)
def bench_plot(context: typer.Context) -> None:
    _become("measure.serve.plot", context.args, "matplotlib")


def _become(module: str, arguments: list[str], *needed: str) -> None:
    """Turn this process into `python -m module` in the environment of a role. Fails if one of the packages in `needed`
    is not installed."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print(f"hackkv: {', '.join(missing)} not installed: pip install 'hackkv[eval]'", file=sys.stderr)
        raise typer.Exit(2)
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], {**ENVIRONMENT, **os.environ})
