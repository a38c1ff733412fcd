"""The shipped model, a prompt and its answers in the clear: the inputs of owner and client, and the expected output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
from safetensors.torch import load_file

from bench.private.model import Shape, folded
from bench.private.report import Answer
from bench.private.rules import Rules
from bench.private.session import InTheClear, Task, Values, respond
from hackkv.model.config import read_spec
from hackkv.packaged import SHIPPED
from hackkv.tokenizer import Tokenizer
from measure.accuracy.text import held_out


@dataclass(frozen=True, slots=True)
class Model:
    """The model hackkv-small with its weights and tokenizer."""

    shape: Shape
    weights: dict[str, Values]
    tokenizer: Tokenizer

    @classmethod
    def shipped(cls) -> Model:
        """The shipped model, with folded weights."""
        spec = read_spec(SHIPPED)
        shape = Shape(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope.theta)
        tensors = {name: each.float().numpy() for name, each in load_file(SHIPPED / "model.safetensors").items()}
        return cls(shape, folded(shape, tensors), Tokenizer(SHIPPED))

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """The first tokens of the first document that no training saw."""
        return tuple(self.tokenizer.encode(held_out(SHIPPED).documents[0].text, add_special_tokens=False)[:tokens])

    def task(self, tokens: int, answer: int, variants: tuple[str, ...], dealt: bool = False) -> Task:
        """The task of answering a prompt of `tokens` tokens."""
        sizes = {name: each.shape for name, each in self.weights.items()}
        return Task(self.shape, Rules(), sizes, tokens, answer, variants, dealt)

    def expected(self, task: Task) -> tuple[dict[str, Any], dict[str, Values]]:
        """(what the client must learn, the arrays that may be dealt), computed in the clear."""
        machine = InTheClear()
        learned = respond(machine, replace(task, dealt=False), self.prompt(task.tokens), self.weights)
        (first,) = {tokens[0] for tokens in learned["tokens"].values()}
        machine.arrays["logits"] = np.eye(1, task.sizes["embed"][0], first)
        return learned, {name: machine.arrays[name].astype(np.float32) for name in task.deals()}

    def compared(self, expected: dict[str, Any], learned: dict[str, Any]) -> tuple[dict[str, Answer], tuple[int, int]]:
        """(answers compared with those in the clear, (rows that stayed, how many of them stay in the clear too))."""
        answers = dict[str, Answer]()
        for name, tokens in learned["tokens"].items():
            same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected["tokens"][name], strict=True))
            answers[name] = Answer(self.tokenizer.decode(tokens), sum(1 for _ in same))
        heads = [
            (set(ours), set(theirs))
            for layer, of_layer in expected["kept"].items()
            for ours, theirs in zip(of_layer, learned["kept"][str(layer)], strict=True)
        ]
        return answers, (sum(len(ours) for ours, _ in heads), sum(len(ours & theirs) for ours, theirs in heads))
