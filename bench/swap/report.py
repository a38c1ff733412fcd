"""The verdict on three runs, and the section of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.sections import write_section
from bench.swap.load import COUNTERS, Run
from bench.swap.workload import LOAD, MAX_BATCH, MODEL, OUTPUT_TOKENS, PROMPT_TOKENS, SHARE, Memory

WANTED = 0.9
SECTION = "bench.swap"


@dataclass(frozen=True, slots=True)
class Result:
    """The record. The ample cluster ran before and after the tight one."""

    codec: str
    seconds: float
    machine: str
    commit: str
    memory: dict[str, Memory]
    ample_tokens_per_s: list[float]
    """Means (before, after)."""
    tight_tokens_per_s: float
    windows: dict[str, list[float]]
    """Tokens per second in windows of ten seconds."""
    mean_batch: dict[str, float]
    decode_cores: dict[str, float]
    requests: dict[str, int]
    slowest_s: dict[str, float]
    swaps: dict[str, float]
    """The swap counters of the tight node."""
    ample_swaps: float
    compared_outputs: int
    different_outputs: int
    recomputed_tokens: float
    failures: dict[str, int]
    dead: list[str]

    @property
    def ratio(self) -> float:
        """Throughput with a tenth of the memory, as a share of that with all of it."""
        return self.tight_tokens_per_s / mean(self.ample_tokens_per_s)

    @property
    def holds(self) -> bool:
        """Whether nothing failed, all outputs were equal, the tight node swapped, and it reached `WANTED`."""
        right = not (self.failures or self.different_outputs or self.recomputed_tokens or self.dead)
        compared = self.compared_outputs > 0 and self.swaps["hackkv_swap_out_total"] > 0
        return right and compared and self.ratio >= WANTED


def judge(
    before: Run, tight: Run, after: Run, memory: dict[str, Memory], codec: str, seconds: float, where: tuple[str, str]
) -> Result:
    """Compare the tight run with the two ample ones."""
    runs: Sequence[Run] = (before, tight, after)
    undisturbed = {**after.outputs, **before.outputs}
    common = undisturbed.keys() & tight.outputs.keys()
    ample = {"ample": [*before.windows, *after.windows], "tight": tight.windows}
    failures = sum((run.failures for run in runs), start=type(tight.failures)())
    return Result(
        codec=codec,
        seconds=seconds,
        machine=where[0],
        commit=where[1],
        memory=memory,
        ample_tokens_per_s=[mean(before.windows), mean(after.windows)],
        tight_tokens_per_s=mean(tight.windows),
        windows=ample,
        mean_batch={"ample": mean([*before.batches, *after.batches]), "tight": mean(tight.batches)},
        decode_cores={"ample": mean((before.decode_cores, after.decode_cores)), "tight": tight.decode_cores},
        requests={"ample": before.served + after.served, "tight": tight.served},
        slowest_s={"ample": max(before.slowest_s, after.slowest_s), "tight": tight.slowest_s},
        swaps=tight.counters,
        ample_swaps=before.counters[COUNTERS[0]] + after.counters[COUNTERS[0]],
        compared_outputs=len(common),
        different_outputs=sum(undisturbed[index] != tight.outputs[index] for index in common),
        recomputed_tokens=sum(run.recomputed_tokens for run in runs),
        failures=dict(failures),
        dead=[name for run in runs for name in run.dead],
    )


def record(result: Result) -> dict[str, Any]:
    """The result as fields for JSON."""
    return {**asdict(result), "ratio": result.ratio, "holds": result.holds}


def save(result: Result, folder: Path) -> None:
    """Write the result to the record and the page."""
    write_section(folder, SECTION, section(result), record(result), page="reliability")


def section(result: Result) -> str:
    """The result in Markdown."""
    ample, tight = result.memory["ample"], result.memory["tight"]
    before, after = result.ample_tokens_per_s
    swaps_out, swaps_in, swapped_s = (result.swaps[name] for name in COUNTERS)
    rows = [
        ("memory of the decode node, sealed and open pages", _mib(ample), _mib(tight)),
        ("sealed pages / sequences at once", f"{ample.pages} / {ample.slots}", f"{tight.pages} / {tight.slots}"),
        ("sequences in a step, mean", *_pair(result.mean_batch, ".0f")),
        ("tokens per second", f"{before:.0f} before, {after:.0f} after", f"{result.tight_tokens_per_s:.0f}"),
        ("cores that the decode node used", *_pair(result.decode_cores, ".2f")),
        ("requests served", *_pair(result.requests, "d")),
        ("slowest request", *(f"{text} s" for text in _pair(result.slowest_s, ".0f"))),
        ("sequences swapped out / back", f"{result.ample_swaps:.0f}", f"{swaps_out:.0f} / {swaps_in:.0f}"),
    ]
    verdict = "It holds." if result.holds else "**It does not hold.**"
    failed = "; ".join(f"{count} x {what}" for what, count in result.failures.items()) or "none"
    lines = [
        f"{LOAD * MAX_BATCH} clients (three times a full batch of {MAX_BATCH}), prompts of {PROMPT_TOKENS[0]} to "
        f"{PROMPT_TOKENS[1]} tokens and outputs of {OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}, codec `{result.codec}`; "
        f"{result.seconds:g} seconds of load on a node with {SHARE:.0%} of the memory that all of them would fill.",
        "",
        "| | ample memory | a tenth of it |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"{verdict} **{result.ratio:.1%}** of the throughput; wanted {WANTED:.0%}. Failures: {failed}. Processes that "
        f"died: {', '.join(result.dead) or 'none'}. Tokens recomputed: {result.recomputed_tokens:.0f}. Outputs "
        f"compared with the ample run's: {result.compared_outputs}, different: {result.different_outputs}. Who was "
        f"swapped out was away for {swapped_s / max(1.0, swaps_in):.1f} s on average.",
        "",
        f"The model is a random one of {MODEL.layers} layers and {MODEL.hidden} channels in FP32 on one thread, not "
        "the smallest that runs: with that one a step mostly starts operators, and twice the batch gives nearly twice "
        "the tokens. A tenth of the memory holds about a third of a batch; it is as good as all of it only where that "
        "third saturates the processor.",
        "",
        f"Machine: {result.machine}. Commit {result.commit}.",
    ]
    return "\n".join(lines)


def _mib(memory: Memory) -> str:
    return f"{memory.size / 2**20:.1f} MiB"


def _pair(values: dict[str, float] | dict[str, int], how: str) -> tuple[str, str]:
    return format(values["ample"], how), format(values["tight"], how)
