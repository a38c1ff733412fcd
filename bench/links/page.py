"""docs/jct.md: tables of the measurements, and sentences that follow from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench.links.cell import OUTPUT_TOKENS, PROMPTS, Result
from bench.links.link import FREE, bits_per_s
from hackkv.timing import Stage

STATISTICS: Final = {"mean": "Mean", "median": "p50", "p99": "p99"}
LEAST_NOISE: Final = 0.05
IDLE: Final = 0.01
"""A link counts as idle if KV crosses it in at most this share of a request's time."""
QUEUES: Final = (Stage.ROUTER_QUEUE, Stage.PREFILL_QUEUE, Stage.SWAP_WAIT, Stage.DECODE_QUEUE)
LLAMA_8B_BYTES: Final = 131_072
"""FP16 KV of one token of Llama-3.1-8B: 32 layers, 8 heads, head_dim 128, K and V."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts of the experiment that are not in the results."""

    machine: str
    share: float
    """The offered load, as a share of the rate that the slowest codec serves on the free link."""
    capacity: Mapping[str, Mapping[str, float]]
    """Prompt -> codec -> requests per second on the free link, with enough requests under way to keep it busy."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell with its place in the table."""

    prompt: str
    link: str
    codec: str
    result: Result

    @property
    def jct_ms(self) -> float:
        """Mean job completion time in milliseconds."""
        return float(self.result["mean_e2el_ms"])

    @property
    def bytes_per_request(self) -> float:
        """Bytes of KV on the wire per request, with message headers."""
        return float(self.result["kv"]["bytes"] / max(1, self.result["completed"]))

    @property
    def link_load(self) -> float:
        """Bits of KV that requests need over bits that the link carries; 0 on the free link."""
        if self.link == FREE:
            return 0.0
        return float(8 * self.bytes_per_request * self.result["request_rate"] / bits_per_s(self.link))

    @property
    def crossing_ms(self) -> float:
        """Milliseconds that a request's KV takes on a link that carries nothing else; 0 on the free link."""
        return 0.0 if self.link == FREE else 8e3 * self.bytes_per_request / bits_per_s(self.link)

    def stage_ms(self, stage: Stage, statistic: str = "mean") -> float:
        """A statistic of one stage, in milliseconds."""
        return float(self.result["stages"][stage][statistic])


def page(cells: Mapping[str, Result], setting: Setting) -> str:
    """The whole page. `cells` maps 'prompt/link/codec' to results, in the order of the tables."""
    measured = [_measured(name, result) for name, result in cells.items()]
    lines = [
        "# Job completion time by link and codec",
        "",
        "The paper's experiment in small, made by `python -m bench.jct` (as root): the model that ships with hackkv,",
        "one prefill and one decode node with a compute thread each, in a network namespace where what is sent to the",
        f"decode node passes a link (`tc`'s token buckets). {OUTPUT_TOKENS} tokens out; Poisson arrivals at "
        f"{setting.share:.0%} of the",
        "requests/s that the slower codec serves on the free link: near its saturation, not beyond it. Every cell gets",
        "the same requests at the same moments. Times in milliseconds; nodes, router and load generator share",
        f"{setting.machine}.",
    ]
    for prompt, tokens in PROMPTS.items():
        if rows := [each for each in measured if each.prompt == prompt]:
            lines += ["", f"## {prompt.capitalize()} prompts ({tokens} tokens)", "", *_load(rows, setting)]
            lines += ["", f"![Mean job completion time by stage, {prompt} prompts](jct-{prompt}.png)"]
            for statistic, title in STATISTICS.items():
                lines += ["", f"{title}:", "", *_times(rows, statistic)]
    return "\n".join([*lines, "", *_reading(measured), ""])


def _measured(name: str, result: Result) -> Measured:
    prompt, link, codec = name.split("/")
    return Measured(prompt, link, codec, result)


def _load(rows: list[Measured], setting: Setting) -> list[str]:
    first = rows[0].result
    capacity = ", ".join(f"`{codec}` {rate:.2f}" for codec, rate in setting.capacity[rows[0].prompt].items())
    body = [
        [
            each.link,
            f"{each.result['link_bits_per_s'] / 1e6:,.0f}",
            each.codec,
            f"{each.bytes_per_request / 1e6:.2f}",
            f"{each.result['kv']['ratio']:.1%}",
            *(("–", "–") if each.link == FREE else (f"{each.crossing_ms:.1f}", f"{each.link_load:.0%}")),
            each.result["failed"],
        ]
        for each in rows
    ]
    head = [
        "link",
        "measured, Mbit/s",
        "codec",
        "KV per request, MB",
        "of FP16",
        "alone on the link, ms",
        "the link's load",
        "failed",
    ]
    told = (
        f"Served per second on the free link: {capacity}. Sent: {first['num_prompts']} requests per cell, "
        f"{first['request_rate']:.2f} a second."
    )
    return [told, "", *_table(head, body)]


def _times(rows: list[Measured], statistic: str) -> list[str]:
    body = [
        [
            each.link,
            each.codec,
            *(f"{each.result[f'{statistic}_{metric}_ms']:.1f}" for metric in ("e2el", "ttft")),
            *(f"{each.stage_ms(stage, statistic):.1f}" for stage in Stage),
        ]
        for each in rows
    ]
    return _table(["link", "codec", "JCT", "TTFT", *Stage], body)


def _reading(measured: list[Measured]) -> list[str]:
    """Where `hack` helps and where it does not, according to the numbers."""
    exact = {(each.prompt, each.link): each for each in measured if each.codec == "fp16"}
    pairs = [
        (exact[each.prompt, each.link], each)
        for each in measured
        if each.codec == "hack" and (each.prompt, each.link) in exact
    ]
    if not pairs:
        return []
    noise, why = _noise(measured)
    slowest = min((each.link for each in measured), key=lambda link: math.inf if link == FREE else bits_per_s(link))
    lines = ["## Reading it", "", f"Mean of `hack` over mean of `fp16`. {why}", ""]
    verdicts: dict[str, list[str]] = {"helps": [], "no difference": [], "costs time": []}
    body = []
    for fp16, hack in pairs:
        ratio = hack.jct_ms / fp16.jct_ms
        verdict = "helps" if ratio < 1 - noise else "costs time" if ratio > 1 + noise else "no difference"
        verdicts[verdict].append(f"{hack.prompt} prompts at {hack.link}")
        moved = hack.stage_ms(Stage.TRANSFER) / fp16.stage_ms(Stage.TRANSFER)
        body.append([hack.prompt, hack.link, f"{ratio:.2f}", f"{moved:.2f}", verdict])
    lines += _table(["prompts", "link", "JCT", "transfer", "`hack`"], body)
    lines += ["", f"- `hack` **helps** with {_listed(verdicts['helps'])}."]
    lines += [
        f"- It **does not help** with {_listed(verdicts['no difference'])} (no difference), and **costs time** with "
        f"{_listed(verdicts['costs time'])}."
    ]
    lines += [_stages_apart(fp16, hack) for fp16, hack in pairs if hack.link == FREE]
    lines += [_link_alone(each, measured) for each in measured if each.link == slowest and slowest != FREE]
    lines += [line for each in measured for line in _overloaded(each)]
    lines += [
        f"- {each.result['failed']} requests failed, and are in no time: "
        f"`{each.codec}`, {each.prompt} prompts at {each.link}."
        for each in measured
        if each.result["failed"]
    ]
    return [*lines, _sums(measured), _scale(measured)]


def _noise(measured: list[Measured]) -> tuple[float, str]:
    """The relative difference of times between links that are almost idle, and a sentence about it."""
    idle: dict[tuple[str, str], list[float]] = {}
    for each in measured:
        if each.crossing_ms <= IDLE * each.jct_ms:
            idle.setdefault((each.prompt, each.codec), []).append(each.jct_ms)
    spreads = [max(times) / min(times) - 1 for times in idle.values() if len(times) > 1]
    if not spreads:
        return LEAST_NOISE, f"No cell was repeated; less than {LEAST_NOISE:.0%} is called no difference."
    noise = max(LEAST_NOISE, *spreads)
    return noise, (
        f"On links that KV crosses in {IDLE:.0%} of the time or less, the same codec and requests differ by up to "
        f"{max(spreads):.0%}; less than {noise:.0%} is called no difference."
    )


def _stages_apart(fp16: Measured, hack: Measured) -> str:
    """A line about the stages in which the two codecs differ when the network costs nothing."""
    apart = {stage: hack.stage_ms(stage) - fp16.stage_ms(stage) for stage in Stage}
    largest = sorted(apart, key=lambda stage: -abs(apart[stage]))[:3]
    return (
        f"- Unthrottled, {hack.prompt} prompts take {fp16.jct_ms:.0f} ms with `fp16` and {hack.jct_ms:.0f} ms with "
        "`hack`: "
        + ", ".join(f"`{stage}` {apart[stage]:+.1f}" for stage in largest)
        + f". Quantizing is {hack.result['sub_stages']['quantize']['mean']:.1f} ms of it."
    )


def _link_alone(each: Measured, measured: list[Measured]) -> str:
    """A line about the effect of a slow link on one codec, without comparing codecs."""
    free = next((one for one in measured if (one.prompt, one.link, one.codec) == (each.prompt, FREE, each.codec)), None)
    told = (
        f"- `{each.codec}` with {each.prompt} prompts at {each.link}: KV takes {each.crossing_ms:.0f} ms on an empty "
        f"link, and {each.stage_ms(Stage.TRANSFER):.0f} ms are waited for after prefill; the rest passes while prefill "
        "computes."
    )
    return told if free is None else f"{told} JCT is {each.jct_ms / free.jct_ms:.2f} of that on the free link."


def _queued(each: Measured) -> float:
    """Share of the time for which requests wait for a node."""
    return sum(each.stage_ms(stage) for stage in QUEUES) / each.jct_ms


def _overloaded(each: Measured) -> list[str]:
    """Lines about a cell whose times depend on the load more than on a request."""
    told = []
    if each.link_load >= 1:
        told += [f"asks for {each.link_load:.0%} of what the link carries"]
    if _queued(each) > 0.5:
        told += [f"waits in the nodes' queues for {_queued(each):.0%} of the time"]
    return [
        f"- `{each.codec}` with {each.prompt} prompts at {each.link} {what}: that is too much load, and its times "
        "grow for as long as it lasts."
        for what in told
    ]


def _sums(measured: list[Measured]) -> str:
    off = max(abs(sum(each.stage_ms(stage) for stage in Stage) / each.jct_ms - 1) for each in measured)
    return f"- Mean stages sum to the mean time that clients measured, within {off:.2%} in every cell."


def _scale(measured: list[Measured]) -> str:
    largest = max(measured, key=lambda each: int(each.result["kv"]["fp16_bytes"]))
    per_token = largest.result["kv"]["fp16_bytes"] / largest.result["total_input_tokens"]
    return (
        f"- The model is small: {per_token / 1e3:.1f} kB of KV per token in FP16, where Llama-3.1-8B has "
        f"{LLAMA_8B_BYTES / 1e3:.0f} kB. From which rate on a link no longer matters depends on that and on how long "
        "prefill takes, so it is another one on a machine with GPUs."
    )


def _table(head: Iterable[Any], body: Iterable[Iterable[Any]]) -> list[str]:
    columns = list(head)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *body)]


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing that was measured"
