"""Conclusions from the tables: the codec for each link and length, where codes lose, and HACK's comparison repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.codecs.facts import SHORT, Facts
from bench.codecs.jct import LINKS, PROMPTS
from bench.codecs.tables import JCT, MISSING, table
from hackkv.canary import PresetRow
from hackkv.nodes import CodecLoss
from measure.accuracy.advice import HARD_TO_TELL, SAME_JCT, ranked
from sim.paper.numbers import numbers

CODES: Final = ("hack", "hack-k4v2", "rot-k4v4", "rot-k3v3", "rot-k3v2", "rot-k2v2")
"""Codecs whose codes attention multiplies as they are stored."""
OURS: Final = ("hack", "rot-k3v2")
RIVALS: Final = (
    "fp16",
    "cachegen",
    "cachegen-unfused",
    "cachegen-eq86",
    "cachegen-eq86-unfused",
    "cachegen-fp16",
    "kvquant-2",
    "kvquant-2-unfused",
)


def advice(facts: Sequence[Facts]) -> str:
    """A table of links and lengths by the rule of `hackkv eval --recommend`, and the cells in which codes lose."""
    body = [
        (f"{tokens:,}", "free" if link == "none" else link, *_advised(facts, prompt, link))
        for prompt, tokens in PROMPTS.items()
        for link in LINKS
        if sum((prompt, link) in each.jct for each in facts) > 1
    ]
    if not body:
        return f"Not measured: `{JCT.format('all')}`."
    rule = (
        f"Of the codecs that are hard to tell from exact KV ({HARD_TO_TELL}; {SHORT:,} tokens) and whose job takes at "
        f"most {SAME_JCT - 1:.0%} longer than the shortest, the smallest; evictions are never among them."
    )
    head = ("prompt", "link", "serve", "JCT of `fp16`'s", "of FP16's bytes", "next", "fastest of all")
    return "\n".join([rule, "", *table(head, body), "", *_where_codes_lose(facts)])


def _advised(facts: Sequence[Facts], prompt: str, link: str) -> tuple[str, ...]:
    seconds = {each.row.name: found for each in facts if (found := each.jct_s(prompt, link)) is not None}
    rows = [
        _row(each) for each in facts if each.row.name in seconds and SHORT in each.lost and not each.row.is_strawman
    ]
    fastest = min(seconds, key=lambda name: seconds[name])
    order = ranked(rows, seconds)
    if not order:
        return (MISSING, MISSING, MISSING, MISSING, f"`{fastest}`")
    best, *others = order
    beside = f"{seconds[best.name] / seconds['fp16']:.2f}" if "fp16" in seconds else MISSING
    runner = f"`{others[0].name}`" if others else MISSING
    return (f"`{best.name}`", beside, f"{best.share:.1%}", runner, f"`{fastest}`")


def _row(each: Facts) -> PresetRow:
    lost = each.lost[SHORT]
    loss = CodecLoss(kl=lost.kl, top1=lost.top1, perplexity_ratio=1 + lost.perplexity_change, tokens=SHORT)
    return PresetRow(each.row.name, each.share, None if each.row.name == "fp16" else loss, each.evicts)


def _where_codes_lose(facts: Sequence[Facts]) -> Iterator[str]:
    """A line for each kind of loss: longer jobs, and worse answers."""
    by_name = {each.row.name: each for each in facts}
    for rival in ("fp16", "fp8"):
        lost = [
            f"`{name}` at {prompt}, {link} ({ours / theirs:.2f})"
            for name in CODES
            for prompt in PROMPTS
            for link in LINKS
            if name in by_name
            and (ours := by_name[name].jct_s(prompt, link)) is not None
            and (theirs := by_name[rival].jct_s(prompt, link)) is not None
            and ours > SAME_JCT * theirs
        ]
        where = ", ".join(lost) or "nowhere measured"
        yield f"- Codes take more than {SAME_JCT - 1:.0%} longer than `{rival}`: {where}."
    beaten = list(_beaten(by_name))
    yield (
        "- A codec that is dequantized loses less (KL) and holds no more bytes than codes: "
        f"{', '.join(beaten) or 'nowhere measured'}."
    )


def _beaten(by_name: dict[str, Facts]) -> Iterator[str]:
    for name, ours in ((name, by_name[name]) for name in CODES if name in by_name):
        better = [
            each.row.name
            for each in by_name.values()
            if each.row.codec.name not in CODES
            and not each.row.is_strawman
            and not each.evicts
            and SHORT in each.lost
            and SHORT in ours.lost
            and each.share <= ours.share
            and each.lost[SHORT].kl < ours.lost[SHORT].kl
        ]
        if better:
            yield f"`{name}` to {', '.join(f'`{each}`' for each in better)}"


def comparison(facts: Sequence[Facts]) -> str:
    """How much shorter jobs are than with each rival, in percent: the paper's numbers, then ours."""
    paper = [
        (name, f"Fig. {case.figure}", *(f"{percent:.1f}%" for percent in case.reductions))
        for name, case in numbers().cases.items()
    ]
    lines = ["What the paper reports of HACK, JCT less than with:", ""]
    lines += table(("case", "from", "FP16", "CacheGen", "KVQuant"), paper)
    by_name = {each.row.name: each for each in facts}
    rivals = [by_name[name] for name in RIVALS if name in by_name]
    for name in OURS:
        body = [
            (
                f"{PROMPTS[prompt]:,}",
                "free" if link == "none" else link,
                *(_less(by_name[name], each, prompt, link) for each in rivals),
            )
            for prompt in PROMPTS
            for link in LINKS
            if (prompt, link) in by_name[name].jct
        ]
        lines += ["", f"`{name}` here, SmolLM2 on this CPU, JCT less than with:", ""]
        head = ("prompt", "link", *(f"`{each.row.name}`" for each in rivals))
        lines += table(head, body) if body else [f"Not measured: `{JCT.format(','.join((name, *RIVALS)))}`."]
    return "\n".join(lines)


def _less(ours: Facts, rival: Facts, prompt: str, link: str) -> str:
    mine, theirs = ours.jct_s(prompt, link), rival.jct_s(prompt, link)
    return MISSING if mine is None or theirs is None else f"{1 - mine / theirs:+.1%}"
