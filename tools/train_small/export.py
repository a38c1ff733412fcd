"""Writes the model that ships: BF16 weights, tokenizer, held-out text, card with measurements, and loss curve."""

import itertools
import json
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tools.train_small.corpus import Document
from tools.train_small.train import Run

CARD = Path(__file__).with_name("card.md")
_WIDTH, _HEIGHT, _MARGIN = 640, 260, 36


def write_model(run: Run, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write every file that transformers needs. The tokenizer class is set to one that older versions load too."""
    folder.mkdir(parents=True, exist_ok=True)
    model = run.model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=1,
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        repetition_penalty=1.1,  # small models fall into loops
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    entries = json.loads((folder / "tokenizer_config.json").read_text())
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    for leftover in ("is_local", "local_files_only"):
        entries.pop(leftover, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(entries, indent=2) + "\n")


def write_held_out(documents: list[Document], path: Path) -> None:
    """Write one JSON object per held-out file, for perplexity and as filler of the long-range tasks."""
    lines = [json.dumps({"name": d.name.rpartition("_sources/")[2], "text": d.text}) for d in documents]
    path.write_text("\n".join(lines) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of log.jsonl. If a resumed run repeated a step, the later record counts."""
    records = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def write_card(log: list[dict[str, Any]], report: dict[str, Any], folder: Path) -> None:
    """Write README.md, from the template `card.md`, and loss.svg."""
    values = {
        "steps": f"{log[-1]['step']:,}",
        "tokens": f"{log[-1]['tokens'] / 1e6:.1f} million",
        "minutes": f"{sum(r['seconds'] for r in log) / 60:.0f}",
        "parameters": f"{report['parameters'] / 1e6:.2f} million",
        "characters": f"{report['characters'] / 1e6:.1f} million",
        "corpus_tokens": f"{report['corpus_tokens'] / 1e6:.1f} million",
        "lengths": _lengths(log),
        "losses": _losses(log),
        "bars": _bars(report),
        "samples": _samples(report["samples"]),
    }
    (folder / "README.md").write_text(Template(CARD.read_text()).substitute(values))
    (folder / "loss.svg").write_text(_plot(log))


def _smooth(log: list[dict[str, Any]], at: int, width: int = 40) -> float:
    window = log[max(0, at - width + 1) : at + 1]
    return float(sum(r["loss"] for r in window) / len(window))


def _losses(log: list[dict[str, Any]]) -> str:
    rows = ["| step | tokens | loss |", "|---:|---:|---:|"]
    for k in range(1, 17):
        at = max(0, len(log) * k // 16 - 1)
        rows.append(f"| {log[at]['step']} | {log[at]['tokens'] / 1e6:.1f} M | {_smooth(log, at):.3f} |")
    return "\n".join(rows)


def _lengths(log: list[dict[str, Any]]) -> str:
    """Tokens and minutes spent on rows of each length."""
    tokens: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for before, record in itertools.pairwise([{"tokens": 0}, *log]):
        tokens[record["length"]] += record["tokens"] - before["tokens"]
        seconds[record["length"]] += record["seconds"]
    rows = ["| length | tokens | minutes |", "|---:|---:|---:|"]
    rows += [f"| {n} | {tokens[n] / 1e6:.1f} M | {seconds[n] / 60:.0f} |" for n in sorted(tokens)]
    return "\n".join(rows)


def _bars(report: dict[str, Any]) -> str:
    """The measurements as one table; `exact` is the share of whole answers right."""
    rows = ["| measurement | at | result | whole answers | trials |", "|---|---:|---:|---:|---:|"]
    rows += [f"| held-out perplexity | {n} | {value:.2f} | | |" for n, value in report["perplexity"].items()]
    for name, kind in (("copy", "copying, distance"), ("recall", "key-value recall"), ("needle", "needle question")):
        for at, result in report[name].items():
            rows.append(f"| {kind} | {at} | {result['tokens']:.1%} | {result['exact']:.1%} | {result['n']} |")
    return "\n".join(rows)


def _samples(samples: list[dict[str, str]]) -> str:
    return "\n\n".join(f"```text\n{s['prompt']}⟶{s['completion'].rstrip()}\n```" for s in samples)


def _plot(log: list[dict[str, Any]]) -> str:
    """The smoothed loss against tokens as SVG."""
    every = max(1, len(log) // 300)
    points = [(log[i]["tokens"], _smooth(log, i)) for i in range(0, len(log), every)]
    right, top = points[-1][0], max(loss for _, loss in points)
    floor, wide, high = _HEIGHT - _MARGIN, _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    place = [f"{_MARGIN + x / right * wide:.1f},{floor - y / top * high:.1f}" for x, y in points]
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in (
            (_MARGIN - 4, _MARGIN, "end", f"{top:.1f}"),
            (_MARGIN - 4, floor, "end", "0"),
            (_WIDTH - _MARGIN, floor + 18, "end", f"{right / 1e6:.0f} M tokens"),
            (_MARGIN, 20, "start", "training loss (weighted, mean of 40 steps)"),
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<path d="M{_MARGIN},{_MARGIN}V{floor}H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>'
        f'<polyline points="{" ".join(place)}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>{labels}</svg>\n'
    )
