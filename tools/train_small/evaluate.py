"""Measures a checkpoint with exact KV in transformers: perplexity, copying, recall, needles, sample completions.

Answers are scored under teacher forcing: `tokens` is the share of answer tokens predicted, `exact` the share of answers
predicted whole, which equals the share that greedy decoding gets right.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from measure import tasks
from measure.tasks import Example, Ids, Phrases

COPY_DISTANCES = (128, 512, 1024, 2048, 3072)
LENGTHS = (1024, 2048, 4096)
SEED = 1_000_000
_BATCH_TOKENS = 16384

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "for i in range(",
    ".. function:: copy(source, target)\n\n   Return",
    "The following example shows how to",
    "A dictionary is a",
)
CHATS = (
    "Repeat this text:\nThe quick method returns a list of strings.",
    "Continue this text:\n    def __repr__(self):\n        return",
    "Return an iterator over the lines.\n# note: green window = local random string\n"
    "The default encoding is used.\nWhat is the note green window?",
)


@dataclass(frozen=True)
class Subject:
    """The subject of measurements: a model, its tokenizer, the task phrases, and held-out text."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    phrases: Phrases
    held_out: Ids


@torch.inference_mode()
def perplexity(subject: Subject, length: int, limit: int = 65536) -> float:
    """Perplexity of the held-out text in windows of `length` tokens. The first token of a window is not scored."""
    count = min(len(subject.held_out), limit) // length
    windows = torch.from_numpy(subject.held_out[: count * length].reshape(count, length))
    total = 0.0
    for window in track(windows.split(max(1, _BATCH_TOKENS // length)), f"perplexity {length}", transient=True):
        logits = subject.model(window).logits[:, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits.mT, window[:, 1:], reduction="sum"))
    return math.exp(total / (count * (length - 1)))


@torch.inference_mode()
def score(subject: Subject, examples: list[Example], name: str) -> dict[str, float]:
    """The shares of answer tokens and of whole answers that the model ranks first, and the number of answers."""
    rows = torch.from_numpy(np.stack([tasks.join(e.prompt, e.answer) for e in examples]))
    size = len(examples[0].answer)
    hits = []
    for part in track(rows.split(max(1, _BATCH_TOKENS // rows.shape[1])), name, transient=True):
        logits = subject.model(part, logits_to_keep=size + 1).logits[:, :-1]
        hits.append(logits.argmax(-1) == part[:, -size:])
    right = torch.cat(hits)
    return {"tokens": float(right.float().mean()), "exact": float(right.all(1).float().mean()), "n": len(examples)}


def complete(subject: Subject, prompt: str, greedy: bool, tokens: int = 64) -> str:
    """A completion of `prompt`, greedy or sampled as generation_config.json proposes."""
    ids = subject.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    plain = {"do_sample": False, "temperature": None, "top_p": None, "repetition_penalty": None}
    choice: dict[str, Any] = plain if greedy else {}
    out = subject.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=1, **choice
    )
    return str(subject.tokenizer.decode(out[0, ids.shape[1] :]))


def measure(subject: Subject, trials: int) -> dict[str, Any]:
    """Every measurement, as plain data."""
    phrases, filler = subject.phrases, subject.held_out

    def run(make: Callable[[int, Phrases, Ids, int], Example], at: int) -> dict[str, float]:
        examples = [make(SEED + i, phrases, filler, at) for i in range(trials)]
        return score(subject, examples, f"{make.__name__} {at}")

    return {
        "perplexity": {n: perplexity(subject, n) for n in LENGTHS},
        "copy": {d: run(tasks.copy, d) for d in COPY_DISTANCES},
        "recall": {n: run(tasks.recall, n) for n in LENGTHS},
        "needle": {n: run(tasks.needle, n) for n in LENGTHS},
    }


def samples(subject: Subject) -> list[dict[str, str]]:
    """Completions of fixed prompts, sampled from a fixed seed, and of chats, greedily."""
    torch.manual_seed(0)
    plain = [{"prompt": p, "completion": complete(subject, p, greedy=False)} for p in PROMPTS]
    chats = [
        subject.tokenizer.apply_chat_template(
            [{"role": "user", "content": c}], tokenize=False, add_generation_prompt=True
        )
        for c in CHATS
    ]
    return plain + [{"prompt": str(c), "completion": complete(subject, str(c), greedy=True)} for c in chats]
