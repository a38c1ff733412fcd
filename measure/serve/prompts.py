"""Prompts of a wanted number of tokens, cut from the text that the shipped model's trainer held out.

Random words would say little about a codec: its effect on a model depends on the text that the model reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from hackkv.errors import ConfigError
from hackkv.packaged import SHIPPED, SHIPPED_NAME

_ATTEMPTS = 8


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of the shipped model, of a folder, or of a hub name (cached or downloaded).

    Raises `ConfigError` if there is none.
    """
    path = SHIPPED if name == SHIPPED_NAME else Path(name).expanduser()
    try:
        if path.is_dir():
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # the Rust side raises bare Exception: no such file, no such hub name, no network
        raise ConfigError(
            f"--tokenizer: {name!r} is no folder with a tokenizer.json and no hub name: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptMaker:
    """Cuts prompts out of one long text. Each begins at a random place, so two share a prefix only by chance."""

    def __init__(self, tokenizer: Tokenizer, corpus: Path = SHIPPED / "held_out.jsonl") -> None:
        self._tokenizer = tokenizer
        lines = corpus.read_text(encoding="utf-8").split("\n")
        text = "\n\n".join(json.loads(line)["text"] for line in lines if line)
        self._ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if not self._ids:
            raise ConfigError(f"--tokenizer: the tokenizer makes no token of {corpus.name}")

    def count(self, text: str) -> int:
        """Tokens of `text`, including those that the tokenizer puts around it."""
        return len(self._tokenizer.encode(text).ids)

    def ids(self, tokens: int, rng: np.random.Generator) -> list[int]:
        """`tokens` ids of the text from a random place on."""
        return self._slice(int(rng.integers(len(self._ids))), tokens)

    def text(self, tokens: int, rng: np.random.Generator) -> tuple[str, int]:
        """A text of `tokens` tokens, or as near as possible, and its count.

        A text that is cut between two tokens may be tokenized differently, so the cut is moved until the count is
        right. Texts for which it never is are off by a token.
        """
        start = int(rng.integers(len(self._ids)))
        wanted, best = tokens, ("", 0)
        for _ in range(_ATTEMPTS):
            text = self._tokenizer.decode(self._slice(start, wanted), skip_special_tokens=False)
            count = self.count(text)
            if abs(count - tokens) < abs(best[1] - tokens):
                best = (text, count)
            if count == tokens or wanted + tokens - count < 1:
                break
            wanted += tokens - count
        return best

    def _slice(self, start: int, tokens: int) -> list[int]:
        """`tokens` ids from `start` on; the first id follows the last."""
        ids = self._ids[start : start + tokens]
        while len(ids) < tokens:
            ids += self._ids[: tokens - len(ids)]
        return ids
