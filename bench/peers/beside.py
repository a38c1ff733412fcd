"""The results of `bench.peers beside` so far, the parts that are left, and the section about both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from bench.peers.process import NOT_INSTALLED
from bench.peers.systems.child import Answer, Result
from bench.peers.table import Entry

ANSWER_TOKENS: Final = 64
HELD: Final = "AVX2's instructions on a processor that has newer ones"
JCT: Final = {"avx2": 0.6}
JCT_ELSE: Final = 0.4
SPEED: Final = 0.8
TOGETHER: Final = 0.5
"""Targets: our time is at most this share of the best peer's."""

ABOUT: Final = (
    "Every system is a process of its own and gets the same token ids of held-out text; no part of a prompt is reused. "
    "hackkv answers through HTTP, router and wire, with prefill and decode node on the same cores: its prefill is all "
    "that is not decode. A peer's prefill is the time to its first token. Several at once were asked of the peers that "
    "are fastest alone."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a system with one setting of KV answers each prompt in turn, or all prompts `together`."""

    entry: Entry
    kv: str
    together: bool

    @property
    def key(self) -> str:
        """The name of the part in the record."""
        return f"{self.entry.name}, KV {self.kv}{', together' if self.together else ''}"


@dataclass(slots=True)
class Record:
    """Results by part, measured in one `setting`."""

    setting: Mapping[str, Any]
    lengths: Sequence[int]
    results: dict[str, list[Result]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Part -> why it could not be done."""

    @classmethod
    def read(cls, kept: Mapping[str, Any] | None, setting: Mapping[str, Any], lengths: Sequence[int]) -> Record:
        """The record that `as_json` wrote; an empty one if its setting differs. Missing systems are tried again."""
        record = cls(setting, lengths)
        if kept and kept.get("setting") == setting:
            record.results = {key: [Result.of(each) for each in runs] for key, runs in kept["results"].items()}
            record.absent = {key: why for key, why in kept["absent"].items() if why != NOT_INSTALLED}
        return record

    def add(self, part: Part, result: Result) -> None:
        """Add one more run of a part."""
        self.results.setdefault(part.key, []).append(result)

    def as_json(self) -> dict[str, Any]:
        """The record as plain fields."""
        results = {key: [asdict(run) for run in runs] for key, runs in self.results.items()}
        return {"setting": self.setting, "results": results, "absent": self.absent}

    def left(self, entries: Sequence[Entry], rounds: int, contenders: int) -> Iterator[Part]:
        """Parts to do, by the record at that time: each alone, round by round, then ours and the best peers at once."""
        for nth in range(1, rounds + 1):
            for entry in entries:
                yield from self._undone((Part(entry, kv, together=False) for kv in entry.kv), nth)
        ours = [Part(entry, kv, together=True) for entry in entries if entry.ours for kv in entry.kv]
        for nth in range(1, rounds + 1):
            yield from self._undone((*ours, *self.best(entries, contenders)), nth)

    def best(self, entries: Sequence[Entry], contenders: int) -> list[Part]:
        """The parts in which the fastest peers get all prompts at once, each peer with its best setting that works."""
        peers = sorted((self.jct_s(part), part.key, part) for part in self.alone(entries) if not part.entry.ours)
        chosen: dict[str, Part] = {}
        for _, _, alone in peers:
            part = Part(alone.entry, alone.kv, together=True)
            if part.key not in self.absent:
                chosen.setdefault(part.entry.name, part)
        return list(chosen.values())[:contenders]

    def alone(self, entries: Sequence[Entry]) -> list[Part]:
        """Parts with an answer to each prompt."""
        parts = (Part(entry, kv, together=False) for entry in entries for kv in entry.kv)
        return [part for part in parts if part.key in self.results]

    def answer(self, part: Part, nth: int) -> Answer:
        """Medians of the answers to the prompt of the nth length."""
        answers = [run.answers[nth] for run in self.results[part.key]]
        return Answer(median(each.prefill_s for each in answers), median(each.decode_s for each in answers))

    def jct_s(self, part: Part) -> float:
        """Median seconds of the longest prompt and its answer."""
        answer = self.answer(part, len(self.lengths) - 1)
        return answer.prefill_s + answer.decode_s

    def together_s(self, part: Part) -> float | None:
        """Median seconds until the last of the requests at once had ended; None if they were not sent."""
        runs = self.results.get(Part(part.entry, part.kv, together=True).key)
        return median(run.together_s for run in runs) if runs else None

    def _undone(self, parts: Iterator[Part] | Sequence[Part], rounds: int) -> Iterator[Part]:
        for part in parts:
            if part.key not in self.absent and len(self.results.get(part.key, ())) < rounds:
                yield part


def section(record: Record, entries: Sequence[Entry], load_average: float) -> str:
    """The page's section: the times of each system, ours over the best peer's, and a line about each system."""
    setting, tokens = record.setting, ANSWER_TOKENS
    command = f"python -m bench.peers beside {'--isa avx2 ' if setting['held'] else ''}--out docs"
    lines = [f"## SmolLM2 beside its peers, {setting['held'] or setting['kernels']}", ""]
    where = f"{setting['model']}; {setting['requests']}; {setting['machine']}; kernels {setting['kernels']}"
    lines.append(f"`{command}` · {where}; load average {load_average:.1f}")
    heads = [f"prefill of {length}, s" for length in record.lengths]
    heads += [f"decode at {length}, ms a token" for length in record.lengths]
    heads += [f"JCT of {record.lengths[-1]} + {tokens}, s", f"{setting['at once']} at once, s", "runs"]
    lines += ["", f"| system | KV | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for part in record.alone(entries):
        answers = [record.answer(part, nth) for nth in range(len(record.lengths))]
        cells = [f"{answer.prefill_s:.2f}" for answer in answers]
        cells += [f"{1e3 * answer.decode_s / (tokens - 1):.1f}" for answer in answers]
        together_s = record.together_s(part)
        cells += [f"{record.jct_s(part):.2f}", f"{together_s:.1f}" if together_s else ""]
        cells.append(str(len(record.results[part.key])))
        lines.append(f"| {part.entry.name} | {part.kv} | {' | '.join(cells)} |")
    lines += ["", *_ratios(record, entries), ""]
    lines += [line for entry in entries for line in _about(record, entry)]
    lines += ["", ABOUT]
    return "\n".join(lines)


def _ratios(record: Record, entries: Sequence[Entry]) -> list[str]:
    """A table of our times over those of the fastest peer, by measure."""
    last, alone = len(record.lengths) - 1, record.alone(entries)
    ours, peers = [part for part in alone if part.entry.ours], [part for part in alone if not part.entry.ours]
    if not ours or not peers:
        return []
    equal = [part for part in peers if part.entry.bits == ours[0].entry.bits]
    whole = JCT.get(record.setting["kernels"], JCT_ELSE)
    rows: list[tuple[str, list[Part], dict[str, float], float]] = [
        (f"JCT of {record.lengths[-1]} + {ANSWER_TOKENS}", peers, {p.key: record.jct_s(p) for p in alone}, whole),
        (f"prefill of {record.lengths[-1]}", peers, {p.key: record.answer(p, last).prefill_s for p in alone}, SPEED),
        (
            f"decode at {record.lengths[-1]}, equal weight bits",
            equal,
            {p.key: record.answer(p, last).decode_s for p in alone},
            SPEED,
        ),
        (
            f"{record.setting['at once']} at once",
            peers,
            {p.key: took_s for p in alone if (took_s := record.together_s(p))},
            TOGETHER,
        ),
    ]
    lines = ["| of the best peer's time | best peer | " + " | ".join(f"KV {part.kv}" for part in ours) + " | target |"]
    lines.append("|---|---|" + "---|" * (len(ours) + 1))
    for what, rivals, seconds, target in rows:
        if measured := [part for part in rivals if part.key in seconds]:
            best = min(measured, key=lambda part: seconds[part.key])
            cells = [f"{seconds[p.key] / seconds[best.key]:.2f}" if p.key in seconds else "" for p in ours]
            lines.append(f"| {what} | {best.key} | {' | '.join(cells)} | ≤ {target} |")
    return lines


def _about(record: Record, entry: Entry) -> list[str]:
    """A line about a system that was measured, and one for each part that could not be measured."""
    keys = [Part(entry, kv, together).key for kv in entry.kv for together in (False, True)]
    lines = []
    if run := next((runs[0] for key in keys for runs in [record.results.get(key)] if runs), None):
        held = f"; held {entry.held}" if record.setting["held"] else ""
        lines.append(f"- {entry.name} {run.version}: weights {entry.weights}{held}.")
    return lines + [f"- {key}: **not measured**: {record.absent[key]}" for key in keys if key in record.absent]
