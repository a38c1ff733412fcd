"""Windows of text: scored windows are held out; calibration windows are files that no trainer of ours holds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hackkv.packaged import SHIPPED
from measure.accuracy.text import held_out, not_held_out
from measure.calibrate.windows import DOCUMENT_TOKENS, WINDOW_TOKENS

Encode = Callable[[str], Tensor]


@dataclass(frozen=True)
class Window:
    """The first `tokens` tokens of a held-out file from character `start` on."""

    file: str
    start: int
    tokens: int

    def ids(self, encode: Encode) -> Tensor:
        """Token ids, int64 [tokens]."""
        text = next(document.text for document in held_out(SHIPPED).documents if document.name == self.file)
        return encode(text[self.start :])[: self.tokens]


SCORED: Final = {
    "data": Window("reference/datamodel.rst.txt", 20000, 2048),
    "news": Window("whatsnew/3.7.rst.txt", 4000, 2048),
    "long": Window("whatsnew/2.0.rst.txt", 0, 8192),
}


def calibration(encode: Encode, windows: int) -> list[Tensor]:
    """Windows of 2,048 ids: the first tokens of files of this Python's library, as `hackkv calibrate` reads them."""
    parts, count = list[Tensor](), 0
    for document in not_held_out():
        parts.append(encode(document.text)[:DOCUMENT_TOKENS])
        count += len(parts[-1])
        if count >= windows * WINDOW_TOKENS:
            break
    return list(torch.cat(parts)[: windows * WINDOW_TOKENS].split(WINDOW_TOKENS))
