"""`hackkv bench serve`: send a server a load and measure what its clients see.

Works with any OpenAI-style server. Requests arrive as a Poisson process (--request-rate, --burstiness); their lengths
are those of the HACK paper's data sets (--shape), fixed (--input-len), or read from a JSONL trace; their prompts are
real text. Against our own router the report also says in which stage the time went. Needs nothing but the address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hackkv.errors import ConfigError, HackkvError
from measure.serve.arrivals import arrival_times
from measure.serve.calls import PlannedRequest, from_shape, from_trace, read_trace
from measure.serve.client import Api, Client, RequestOutcome, Server
from measure.serve.load import run_load
from measure.serve.prompts import PromptMaker, find_tokenizer
from measure.serve.report import print_report
from measure.serve.shapes import SHAPES, fixed
from measure.serve.summary import Metric, details, summarize

DEFAULT_SHAPE = "humaneval"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, report; returns the exit code: 1 if a request failed, 2 if arguments or server cannot be used."""
    parser = _parser()
    args = parser.parse_args(arguments)
    notes = Console(stderr=True, highlight=False)
    try:
        result = asyncio.run(_measure(args, notes))
    except HackkvError as error:
        notes.print(f"hackkv bench serve: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    print_report(result, Console(highlight=False))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
        notes.print(f"wrote {args.out}", markup=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hackkv bench serve", description=__doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    server.add_argument("--model", default="", help="default: the first that the server lists")
    server.add_argument("--tokenizer", default="", help="folder or hub name; default: the model's name")
    server.add_argument(
        "--backend", type=Api, choices=list(Api), default=Api.COMPLETIONS, help="endpoint to call; default: %(default)s"
    )
    server.add_argument("--api-key-file", type=Path, help="file with the key; default: $OPENAI_API_KEY")
    server.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="silence that fails a request")
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=_count, help="default: 100, or the whole trace")
    load.add_argument(
        "--request-rate", type=_rate, metavar="PER_S", help="default: inf (all at once), or as in the trace"
    )
    load.add_argument("--burstiness", type=_positive, default=1.0, help="1 is Poisson, less is burstier")
    load.add_argument("--max-concurrency", type=_count, help="requests under way at once; default: no limit")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, lengths, prompts and sampling")
    load.add_argument("--num-warmups", type=int, default=1, help="requests sent first and not counted")
    what = parser.add_argument_group("requests")
    kind = what.add_mutually_exclusive_group()
    kind.add_argument("--shape", choices=tuple(SHAPES), help=f"lengths as in Table 4; default: {DEFAULT_SHAPE}")
    kind.add_argument("--input-len", type=_count, help="every prompt has so many tokens")
    kind.add_argument("--trace", type=Path, help="JSONL with prompt or input_length, output_length, timestamp (ms)")
    what.add_argument("--output-len", type=_count, default=64, help="with --input-len; default: %(default)s")
    what.add_argument("--scale", type=_positive, default=1.0, help="stretches lengths, for models of short context")
    what.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for outputs of the full length; some servers do not know the field (default: on)",
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", nargs="+", type=_limit, metavar="METRIC:MS", help="count requests that keep ttft, tpot, e2el"
    )
    report.add_argument("--label", default="", help="name of the run in tables and plots; default: the codec")
    report.add_argument("--out", type=Path, metavar="FILE.json", help="write the numbers; hackkv bench plot reads them")
    report.add_argument("--save-detailed", action="store_true", help="write every request's times as well")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _rate(text: str) -> float:
    return math.inf if text == "inf" else _positive(text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _limit(text: str) -> tuple[Metric, float]:
    name, _, limit = text.partition(":")
    known = [metric for metric in Metric if metric is not Metric.ITL]
    if name not in known:
        raise argparse.ArgumentTypeError(f"{text}: expected METRIC:MS with one of {', '.join(known)}")
    return Metric(name), _positive(limit)


async def _measure(args: argparse.Namespace, notes: Console) -> dict[str, Any]:
    """Find the server, plan the load, run it, and return the result as JSON."""
    client = Client(args.base_url, args.backend, _api_key(args.api_key_file), args.timeout)
    try:
        server = await client.server()
        model = args.model or server.model
        calls = _plan(args, PromptMaker(find_tokenizer(args.tokenizer or model)))
        _check_room(calls, server)
        fields = {"model": model, "temperature": args.temperature, "seed": args.seed}
        fields |= {"ignore_eos": True} if args.ignore_eos else {}
        fields |= {"return_stages": True} if server.has_stages else {}
        for call in calls[: args.num_warmups]:
            await _warm_up(client, call, fields)
        began = datetime.now(UTC)
        outcomes, duration_s = await _send(client, calls, fields, args.max_concurrency, notes)
    finally:
        await client.close()
    limits = dict(args.goodput or ())
    summary = summarize(outcomes, duration_s, limits)
    return {
        "date": began.isoformat(timespec="seconds"),
        "label": args.label or summary.get("kv", {}).get("codec") or model,
        "backend": args.backend,
        "model_id": model,
        "num_prompts": len(calls),
        "request_rate": _rate_name(args),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "requests": _requests_name(args),
        "scale": args.scale,
        "goodput": limits,
        **summary,
        **(details(outcomes) if args.save_detailed else {}),
    }


def _plan(args: argparse.Namespace, prompts: PromptMaker) -> list[PlannedRequest]:
    """The requests to send. Arrivals have a generator of their own, so another rate leaves lengths and texts alone."""
    arrival_rng, rng = (np.random.default_rng((args.seed, stream)) for stream in range(2))
    rate = math.inf if args.request_rate is None else args.request_rate
    if args.trace is None:
        shape = fixed(args.input_len, args.output_len) if args.input_len else SHAPES[args.shape or DEFAULT_SHAPE]
        arrivals = arrival_times(args.num_prompts or 100, rate, args.burstiness, arrival_rng)
        return from_shape(shape.scaled(args.scale), arrivals, prompts, rng)
    trace = read_trace(args.trace)[: args.num_prompts]
    if args.request_rate is None and trace[0].timestamp is not None:
        arrivals = [(line.timestamp or 0.0) / 1e3 for line in trace]
    else:
        arrivals = arrival_times(len(trace), rate, args.burstiness, arrival_rng)
    return from_trace(trace, arrivals, args.scale, prompts, rng)


def _check_room(calls: Sequence[PlannedRequest], server: Server) -> None:
    """Raise `ConfigError` if the server says that it cannot serve requests as long as the longest one."""
    longest = max(call.prompt_tokens + call.output_tokens for call in calls)
    if server.max_tokens is not None and longest > server.max_tokens:
        raise ConfigError(
            f"--scale: the longest request has {longest} tokens and the server takes {server.max_tokens}; "
            f"{math.floor(100 * server.max_tokens / longest) / 100:g} of the present scale would fit"
        )


async def _warm_up(client: Client, call: PlannedRequest, fields: dict[str, Any]) -> None:
    outcome = await client.send(call, fields)
    if not outcome.ok:
        raise ConfigError(f"the first request failed, so no more are sent: {outcome.error}")


async def _send(
    client: Client, calls: Sequence[PlannedRequest], fields: dict[str, Any], max_concurrency: int | None, notes: Console
) -> tuple[list[RequestOutcome], float]:
    """Run the load under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=notes, transient=True) as progress:
        bar = progress.add_task("requests", total=len(calls))
        sent = done = failed = 0

        def show() -> None:
            tail = f", {failed} failed" if failed else ""
            progress.update(bar, completed=done, description=f"{sent - done} under way{tail}")

        def on_sent() -> None:
            nonlocal sent
            sent += 1
            show()

        def on_outcome(outcome: RequestOutcome) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (not outcome.ok)
            show()

        return await run_load(client, calls, fields, max_concurrency, on_sent, on_outcome)


def _api_key(path: Path | None) -> str:
    if path is None:
        return os.environ.get("OPENAI_API_KEY", "")
    try:
        keys = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path}: {error}") from error
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys[0]


def _rate_name(args: argparse.Namespace) -> float | str:
    """The rate for JSON, which has no infinity: a word stands for it, as in vLLM."""
    if args.request_rate is None:
        return "trace" if args.trace else "inf"
    return "inf" if math.isinf(args.request_rate) else float(args.request_rate)


def _requests_name(args: argparse.Namespace) -> str:
    if args.trace:
        return str(args.trace)
    return f"{args.input_len} in, {args.output_len} out" if args.input_len else str(args.shape or DEFAULT_SHAPE)


if __name__ == "__main__":
    sys.exit(main())
