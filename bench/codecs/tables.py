"""The tables of docs/codecs.md. A value that was not measured is replaced by the command that measures it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bench.codecs.facts import LONG, SHORT, Facts, Lost
from bench.codecs.jct import LINKS, PROMPTS, Record
from bench.links.cell import OUTPUT_TOKENS
from hackkv.timing import Stage, SubStage

EVAL: Final = "hackkv eval --model smollm2 --tasks {} --out docs/accuracy --variants {}"
JCT: Final = "sudo .venv/bin/python -m bench.codecs jct --rows {}"
KERNELS: Final = "python -m bench.codecs kernels"
MISSING: Final = "–"
INSIDE: Final = (SubStage.QUANTIZE, SubStage.WIRE_ENCODE, SubStage.ATTEND, SubStage.APPROXIMATION, SubStage.WIRE_DECODE)
BESIDE: Final = ("fp16", "fp8")
"""Rows with which times of kernels are compared: no compression, and the rival that a careful user takes first."""


def table(head: Sequence[str], body: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table in Markdown."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *body)]


def honest(facts: Iterable[Facts]) -> list[Facts]:
    """Facts without unfused rows, whose bytes and losses are those of their fused row."""
    return [each for each in facts if not each.row.is_strawman]


# Bytes and loss ------------------------------------------------------------------------------------------------------


def bytes_and_loss(facts: Sequence[Facts]) -> str:
    """Two tables, since evictions are scored on the text after a prompt, and a list of what is not measured."""
    staying = [each for each in honest(facts) if not each.evicts]
    evicting = [each for each in honest(facts) if each.evicts]
    at = [
        "bytes at rest",
        "wire, uncoded",
        "SmolLM2: at rest, of FP16's",
        "on the wire at 4k",
        f"MB at rest at {LONG:,}",
    ]
    loss = [f"KL at {SHORT:,}", "top-1", "perplexity", f"KL at {LONG:,}", "top-1", "perplexity"]
    lines = table(["codec", *at, *loss], ([*_sizes(each), *_lost(each, SHORT), *_lost(each, LONG)] for each in staying))
    lines += ["", f"The 256 tokens after a prompt of {SHORT:,}, from what it left in the cache:", ""]
    lines += table(["codec", *at, *loss[:3]], ([*_sizes(each), *_lost(each, SHORT)] for each in evicting))
    gaps = {
        task: [each.row.name for each in rows if any(point not in each.lost for point in points)]
        for task, rows, points in (("reading", staying, (SHORT, LONG)), ("continuing", evicting, (SHORT,)))
    }
    lines += [
        f"\nNot measured: {', '.join(f'`{name}`' for name in names)}: `{EVAL.format(task, ','.join(names))}`."
        for task, names in gaps.items()
        if names
    ]
    return "\n".join(lines)


def _sizes(each: Facts) -> list[str]:
    wire = each.wire_share("4k")
    return [
        f"`{each.row.name}`",
        f"{each.resting:.1f}".removesuffix(".0"),
        f"{each.sent:.1f}".removesuffix(".0"),
        f"{each.share:.1%}",
        MISSING if wire is None else f"{wire:.1%}",
        f"{each.long_mb:.1f}",
    ]


def _lost(each: Facts, point: int) -> list[str]:
    lost = each.lost.get(point)
    return [MISSING] * 3 if lost is None else _three(lost)


def _three(lost: Lost) -> list[str]:
    return [f"{lost.kl:.4f}", f"{lost.top1:.3f}", f"{lost.perplexity:.2f} ({lost.perplexity_change:+.1%})"]


# Kernels -------------------------------------------------------------------------------------------------------------


def kernels(record: Mapping[str, Any] | None) -> str:
    """Milliseconds of a call, and its ratios to those of `fp16` and `fp8`."""
    if record is None:
        return f"Not measured: `{KERNELS}`."
    rows = record["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    head = ["codec"]
    for row in rows:
        what = f"{row['what'].removeprefix('codecs, ')}, {row['shape'].partition(',')[0]}"
        head += [f"{what}: ms", *(f"of `{other}`'s" for other in BESIDE if other in row["ms"])]
    lines = table(head, ([f"`{name}`", *(text for row in rows for text in _times(row["ms"], name))] for name in names))
    return "\n".join([f"`{KERNELS}` · {record['machine']}.", "", *lines])


def _times(ms: Mapping[str, float], name: str) -> list[str]:
    known = [other for other in BESIDE if other in ms]
    if name not in ms:
        return [""] * (1 + len(known))
    told = f"{ms[name]:.3g}" if ms[name] < 1000 else f"{ms[name]:.0f}"
    return [told, *(f"{ms[name] / ms[other]:.2f}" for other in known)]


# Job completion times ------------------------------------------------------------------------------------------------


def jct(facts: Sequence[Facts]) -> str:
    """Seconds of a job, by prompt and link; the stages have a page of their own."""
    cells = [(prompt, link) for prompt in PROMPTS for link in LINKS]
    some = [each for each in facts if each.jct]
    head = ["codec", *(f"{prompt}, {link}" for prompt, link in cells)]
    lines = table(head, ([f"`{each.row.name}`", *(_seconds(each, *cell) for cell in cells)] for each in some))
    timed = [each for each in facts if each.row.timed]
    missing = [each.row.name for each in timed if any(cell not in each.jct for cell in cells)]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        chosen = "all" if len(missing) == len(timed) else ",".join(missing)
        lines += ["", f"Not measured, or not in all cells: {names}: `{JCT.format(chosen)}`."]
    return "\n".join([*lines, "", *_load(facts), *_spread(facts)] if some else lines)


def _seconds(each: Facts, prompt: str, link: str) -> str:
    seconds = each.jct_s(prompt, link)
    return MISSING if seconds is None else f"{seconds:.2f}"


def _load(facts: Sequence[Facts]) -> list[str]:
    """The load of the machine, and the number of requests that failed and so are in no time."""
    records = [record for each in facts for record in each.jct.values()]
    loads = sorted(record["load_average"] for record in records)
    lines = [
        f"Load average before a cell: {loads[0]:.1f} to {loads[-1]:.1f}, in the middle {loads[len(loads) // 2]:.1f}."
    ]
    failed = sum(record["failed"] for record in records)
    return [*lines, f"{failed} requests failed, and are in no time."] if failed else lines


def _spread(facts: Sequence[Facts]) -> list[str]:
    """How far the times of one row and prompt differ over the links: how far single cells can be trusted."""
    found = sorted(
        max(times) / min(times) - 1
        for each in facts
        for prompt in PROMPTS
        if len(times := [s for link in LINKS if (s := each.jct_s(prompt, link)) is not None]) == len(LINKS)
    )
    if not found:
        return []
    middle, most = found[len(found) // 2], found[len(found) * 9 // 10]
    return [
        f"Over the three links the times of a row and prompt differ by {middle:.0%} in the median, and by at most "
        f"{most:.0%} in nine of ten, although few codecs send enough bytes to notice a link."
    ]


def stages(facts: Sequence[Facts], machine: str) -> str:
    """docs/codecs-jct.md: one table for each prompt and link."""
    lines = [
        "# Job completion time by stage and codec",
        "",
        f"SmolLM2-135M-Instruct, {OUTPUT_TOKENS} tokens out, one request after the other, one prefill and one decode",
        f"node; means in milliseconds. `sudo .venv/bin/python -m bench.codecs jct`, on {machine}.",
        "Sub-stages stand behind the stages of which they are parts ([which](../README.md#serve)).",
    ]
    for prompt, tokens in PROMPTS.items():
        for link in LINKS:
            rows = [(each.row.name, each.jct[prompt, link]) for each in facts if (prompt, link) in each.jct]
            if rows:
                lines += ["", f"## {tokens:,} tokens, {'free link' if link == 'none' else link}", "", *_staged(rows)]
    return "\n".join(lines) + "\n"


def _staged(rows: Sequence[tuple[str, Record]]) -> list[str]:
    head = ["codec", "JCT", "TTFT", *Stage, *INSIDE, "MB sent", "of FP16's"]
    return table(
        head,
        (
            [
                f"`{name}`",
                f"{record['mean_e2el_ms']:.0f}",
                f"{record['mean_ttft_ms']:.0f}",
                *(f"{record['stages'][stage]:.0f}" for stage in Stage),
                *(f"{record['sub_stages'].get(stage, 0):.0f}" for stage in INSIDE),
                f"{record['kv_bytes'] / 1e6:.1f}",
                f"{record['kv_share']:.1%}",
            ]
            for name, record in rows
        ),
    )
