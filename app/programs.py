"""Requests of the demonstration: one program for a model that continues text, one for a model that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TEXT = Path(__file__).with_name("bees.txt").read_text(encoding="utf-8")
_CODE = Path(__file__).with_name("demo.py").read_text(encoding="utf-8")[:5000]


@dataclass(frozen=True, slots=True)
class Program:
    """The requests of one demonstration."""

    streamed: str
    chat: str
    long: str
    """A prompt of some thousand characters."""
    compared: bool
    """Whether the answer to `long` is shown beside the answer of a cluster with exact KV."""
    topics: tuple[str, ...]
    """Prompts that are sent at once."""
    talks: bool
    """Whether prompts are questions to `/v1/chat/completions`, or beginnings for `/v1/completions`."""
    max_tokens: int
    shown: int
    """Number of printed characters of an answer to a topic."""
    sampling: dict[str, Any] = field(default_factory=dict)
    chat_sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of the chat request, which override those of `sampling`."""
    long_sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of the long request, which override those of `sampling`."""


WRITES = Program(
    streamed='''def read_lines(path):
    """Return the lines of a text file, without their line ends."""
''',
    chat="Repeat this text:\nThe quick method returns a list of strings.",
    long=_CODE,
    compared=False,
    topics=(
        "def __init__(self, name, value):\n",
        "import os\nimport sys\n\n\ndef main(",
        "for key in sorted(",
        "The :mod:`os` module provides",
        ".. function:: open(path)\n\n   Return",
        "   This function returns",
        "class Queue:\n    def put(self, item):\n",
        "try:\n    value = int(text)\nexcept ",
    ),
    talks=False,
    max_tokens=48,
    shown=100,
    # The checkpoint proposes a penalty on repetition, and this prompt asks for a repetition.
    chat_sampling={"temperature": 0, "repetition_penalty": 1},
)
"""For a model that was trained on code and manuals, such as the shipped one."""

ANSWERS = Program(
    streamed="Why is the sky blue? Explain it to a curious child.",
    chat="Write a short poem about a lighthouse in the fog.",
    long=f"{_TEXT}\nSummarize this text in three sentences.",
    compared=True,
    topics=(
        "What is the capital of Japan, and what is it known for?",
        "Give me three tips for a good night's sleep.",
        "How does a bicycle stay upright?",
        "Suggest a name for a small bakery, and say why.",
        "What do bees do in winter?",
        "Explain in one sentence what a computer network is.",
        "Tell me a fact about the octopus.",
        "How do I make a simple tomato soup?",
    ),
    talks=True,
    max_tokens=120,
    shown=240,
    sampling={"temperature": 0.2, "top_p": 0.9},
    long_sampling={"temperature": 0, "repetition_penalty": 1.1},
)
"""For a model with a chat template. The settings are those that SmolLM2's makers recommend."""
