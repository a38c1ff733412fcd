"""The most text that one token can stand for, derived from a `tokenizer.json`.

`text_per_token` times a number of tokens is the most text that they can hold. So a text that cannot fit a context is
known without tokenizing it. That holds only where no step of the tokenizer drops text. Each step is looked up in a
table here; if one is not in it, nothing is certain.
"""

from __future__ import annotations

from typing import Any, Final

_FACTORS: Final = {"NFC": 9, "NFD": 3, "Prepend": 1, "ByteLevel": 1}
"""Normalizers -> the factor by which they shorten UTF-8 at most. NFD replaces some characters of three bytes by one of
one byte (U+1FEF). NFC may in addition compose nine bytes to three (Hangul)."""

_KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})
"""Pre-tokenizers that only cut, unless their `behavior` is `Removed`."""


def _char_of_byte() -> dict[int, str]:
    """GPT-2's table, shared by all byte-level tokenizers: printable Latin-1 stands for itself, the rest moves up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


BYTE_OF_CHAR: Final = {char: byte for byte, char in _char_of_byte().items()}
"""The 256 characters that stand for bytes in byte-level vocabularies."""


def text_per_token(tokenizer: dict[str, Any]) -> int | None:
    """The most UTF-8 bytes of a text that become one token; None if a token can stand for any number of them.

    `tokenizer` is the content of a `tokenizer.json`.
    """
    normalizing = _shrinks(tokenizer.get("normalizer"))
    cutters = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    added = tokenizer.get("added_tokens") or []
    if normalizing is None or not all(_keeps(cutter) for cutter in cutters):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):  # such a token swallows blanks beside it
        return None
    model = tokenizer["model"]
    byte_level = any(cutter["type"] == "ByteLevel" for cutter in cutters)
    if model.get("type") != "BPE" or not _knows_every_byte(model, byte_level):
        return None
    # Each character of a byte-level piece stands for one byte. Other pieces are text. Such a piece is never shorter
    # than the text that became it: "▁" has three bytes, and the blank that it replaces has one.
    longest = max((len(piece) if byte_level else len(piece.encode()) for piece in model["vocab"]), default=1)
    return normalizing * max([longest, *(len(token["content"].encode()) for token in added)])


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """The factor by which a normalizer can make a text shorter; None if there is no such factor."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case {"type": kind} if kind in _FACTORS:
                factor *= _FACTORS[kind]
            case _:
                return None
    return factor


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A step, or the steps of a sequence."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for each in part[inner] for step in _steps(each, inner)]
    return [part]


def _keeps(cutter: dict[str, Any]) -> bool:
    return cutter["type"] in _KEEPING and cutter.get("behavior") != "Removed"


def _knows_every_byte(model: dict[str, Any], byte_level: bool) -> bool:
    """Whether no character is unknown: unknown ones are dropped, or many of them become one token."""
    vocab = model["vocab"]
    if byte_level:
        return all(char in vocab for char in BYTE_OF_CHAR)
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
