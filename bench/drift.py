"""Does a cluster answer its last requests as well as its first? `python -m bench.drift [MODEL] [--codec NAME]`.

Requests go one after another, or a few at a time, through a cluster of real processes. The first hundred prompts and
the last hundred are the same. Other prompts come between them, so that pages are taken, given back, shared and swapped.
Every answer is greedy and is compared with the answer of exact KV in this process: agreement is the share of its tokens
before the first that differs. Weights and arithmetic do not age, so first and last answers to a prompt must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from app.cluster import ClusterPlan, running
from bench.sections import write_section
from hackkv.codecs import CODECS
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import DEFAULT_CODEC
from measure.accuracy import engine, stats
from measure.accuracy.machine import commit, this_machine
from measure.accuracy.metrics import first_divergence
from measure.accuracy.subject import Subject, load_subject
from measure.accuracy.variants import EXACT
from measure.tasks import Example, Ids, cut, join

DOCS = Path(__file__).resolve().parents[1] / "docs"
EDGE = 100
"""Number of requests at either end that are compared."""
PROMPT_TOKENS, ANSWER_TOKENS = 160, 16
"""With these lengths, two pages are sealed and half a page stays open."""
TIMEOUT_S = 300.0
"""How long a client waits, in seconds; a busy machine may need more."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Agreement with exact KV of the first and of the last requests, prompt by prompt."""

    requests: int
    first: list[float]
    last: list[float]
    equal: int
    """Prompts whose first and last answers are the same."""
    failed: int

    @property
    def holds(self) -> bool:
        """Whether every request was answered and no answer changed."""
        return not self.failed and self.equal == len(self.first)


def prompts_of(subject: Subject, requests: int, edge: int, seed: int) -> list[Ids]:
    """`requests` windows of held-out text; the last `edge` windows repeat the first ones."""
    windows = [
        join(subject.prefix, cut(np.random.default_rng([seed, i]), subject.filler, PROMPT_TOKENS))
        for i in range(requests - edge)
    ]
    return [*windows, *windows[:edge]]


def exact_answers(subject: Subject, prompts: Sequence[Ids]) -> list[list[int]]:
    """Greedy answers with exact KV, in this process."""
    worker, room = subject.with_codec(EXACT.codec), np.zeros(ANSWER_TOKENS, np.int64)
    answers = list[list[int]]()
    for batch in engine.batches([Example(prompt, room) for prompt in prompts]):
        written = engine.write(worker, [e.prompt for e in batch], [ANSWER_TOKENS] * len(batch))
        answers += [one.ids.tolist() for one in written]
    return answers


def agreement(said: list[int], exact: list[int]) -> float:
    """Share of the longer answer before the first token that differs, in 0..1."""
    at = first_divergence(np.array(said), np.array(exact))
    return 1.0 if at is None else at / max(len(said), len(exact))


async def ask_all(
    url: str, prompts: Sequence[Ids], concurrency: int, console: Console, timeout_s: float = TIMEOUT_S
) -> list[list[int] | None]:
    """The tokens of every answer; None for a request that failed. Prompts are asked in order."""
    answers: list[list[int] | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("requests", total=len(prompts))

            async def visit() -> None:
                for index, prompt in waiting:
                    answers[index] = await _answer(client, prompt)
                    progress.update(bar, advance=1)

            await asyncio.gather(*(visit() for _ in range(concurrency)))
    return answers


async def _answer(client: httpx.AsyncClient, prompt: Ids) -> list[int] | None:
    body = {"prompt": prompt.tolist(), "max_tokens": ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
    try:
        answer = await client.post("/v1/completions", json=body)
    except httpx.HTTPError:
        return None
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else None


def compare(answers: Sequence[list[int] | None], exact: Sequence[list[int]], ends: frozenset[int]) -> Drift:
    """Compare first and last answers with exact ones. End tokens are dropped: the server returns them, `exact` not."""
    edge, told = len(exact), [_without(answer, ends) for answer in answers]
    first, last = told[:edge], told[-edge:]
    return Drift(
        len(answers),
        [agreement(one or [], wanted) for one, wanted in zip(first, exact, strict=True)],
        [agreement(one or [], wanted) for one, wanted in zip(last, exact, strict=True)],
        sum(a is not None and a == b for a, b in zip(first, last, strict=True)),
        sum(answer is None for answer in answers),
    )


def _without(answer: list[int] | None, ends: frozenset[int]) -> list[int] | None:
    return None if answer is None else [token for token in answer if token not in ends]


async def measure(
    subject: Subject,
    codec: CodecConfig,
    requests: int,
    edge: int,
    concurrency: int,
    seed: int,
    timeout_s: float = TIMEOUT_S,
) -> Drift:
    """Start a cluster, send it everything, and compare."""
    console = Console(highlight=False)
    prompts = prompts_of(subject, requests, edge, seed)
    console.print(f"exact answers to {edge} prompts ...")
    exact = await asyncio.to_thread(exact_answers, subject, prompts[:edge])
    async with running(_plan(subject, codec), lambda line: console.print(f"  {line}")) as cluster:
        answers = await ask_all(cluster.url, prompts, concurrency, console, timeout_s)
    return compare(answers, exact, frozenset(subject.worker.model.spec.eos_ids))


def _plan(subject: Subject, codec: CodecConfig) -> ClusterPlan:
    model = subject.model.model_dump()
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": subject.model.path}
    return ClusterPlan(router, {"model": model, "codec": codec.model_dump()}, num_prefill=1, num_decode=1)


def section(result: Drift, model: str, codec: str, where: str) -> tuple[str, dict[str, object]]:
    """The section of docs/reliability.md, and the record beside it; `where` includes the command."""
    first, last = (stats.share(np.array(scores)) for scores in (result.first, result.last))
    change = stats.change(np.array(result.last), np.array(result.first))
    edge = len(result.first)
    lines = [
        f"### Quality over {result.requests:,} requests: {model}",
        "",
        f"`{codec}`, {ANSWER_TOKENS} greedy tokens after {PROMPT_TOKENS}. Agreement with exact KV of the "
        f"first {edge} requests: {first.value:.3f} [{first.low:.3f}, {first.high:.3f}], of the last {edge}, the same "
        f"prompts: {last.value:.3f} [{last.low:.3f}, {last.high:.3f}]; change {change.value:+.3f} "
        f"[{change.low:+.3f}, {change.high:+.3f}]. {result.equal} of {edge} answers are the same; {result.failed} "
        f"requests failed. {'It holds.' if result.holds else '**It does not hold.**'}",
        "",
        f"{where}.",
    ]
    record = {"where": where, "requests": result.requests, "first": result.first, "last": result.last}
    return "\n".join(lines), {**record, "equal": result.equal, "failed": result.failed}


def main() -> int:
    """Measure, print and write docs/reliability.md. The exit code is 0 if all requests were answered without drift."""
    parser = argparse.ArgumentParser("python -m bench.drift", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="folder, GGUF file, hub name or smollm2; default: shipped")
    parser.add_argument("--codec", default=DEFAULT_CODEC, choices=tuple(CODECS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--edge", type=int, default=EDGE)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help=f"of a request; default: {TIMEOUT_S:g}")
    parser.add_argument("--dry", action="store_true", help="do not write docs/reliability.md")
    arguments = parser.parse_args()
    if not 0 < 2 * arguments.edge <= arguments.requests:
        parser.error("--requests must be at least twice --edge")
    subject = load_subject(ModelConfig(path=arguments.model, dtype="float32", threads=1))
    codec = CodecConfig(name=arguments.codec, allow_loss=True)
    sizes = (arguments.requests, arguments.edge, arguments.concurrency, arguments.seed, arguments.timeout_s)
    result = asyncio.run(measure(subject, codec, *sizes))
    machine, command = this_machine("", 0), shlex.join(["python", "-m", "bench.drift", *sys.argv[1:]])
    where = f"`{command}`. Machine: {machine.cpu}, {machine.cores} cores; commit {commit()}"
    text, record = section(result, subject.worker.name, codec.name, where)
    Console(highlight=False).print(text, markup=False)
    if not arguments.dry:
        write_section(DOCS, f"bench.drift {subject.worker.name}", text, record, "reliability")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
