"""The bound on the text of a token holds for every text. There is no bound if a tokenizer drops text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from hackkv.packaged import SHIPPED
from hackkv.token_sizes import text_per_token
from hackkv.tokenizer import Tokenizer

WORDS = ["the quick brown fox jumps over the lazy dog", "        ", "aaaaaaaaaaaaaaaa", "가나다 é ñ"] * 8


def byte_level(normalizer: Any = None) -> Core:
    """A tokenizer like GPT-2's, or like Qwen's with a normalizer."""
    core = Core(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return core


def byte_fallback() -> Core:
    """A tokenizer like Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the", "▁the", "é"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    core = Core(
        models.BPE(
            {piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return core


BOUNDED: dict[str, Callable[[], Core]] = {
    "shipped": lambda: Core.from_file(str(SHIPPED / "tokenizer.json")),
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFD": lambda: byte_level(normalizers.NFD()),
    "byte fallback": byte_fallback,
}


def changed(**parts: Any) -> Core:
    """A byte-level tokenizer with other parts."""
    core = byte_level()
    for name, part in parts.items():
        setattr(core, name, part)
    return core


def blanks_swallowed() -> Core:
    """A tokenizer with a token that takes the blanks before it."""
    core = byte_level()
    core.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return core


def no_bytes() -> Core:
    """A tokenizer that drops characters that are not in its vocabulary."""
    core = Core(models.BPE({"a": 0, "b": 1}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return core


UNBOUNDED: dict[str, Callable[[], Core]] = {
    "blanks dropped": lambda: changed(pre_tokenizer=pre_tokenizers.Whitespace()),
    "pieces removed": lambda: changed(pre_tokenizer=pre_tokenizers.Split("x", "removed")),
    "stripped": lambda: changed(normalizer=normalizers.Strip()),
    "shortened": lambda: changed(normalizer=normalizers.Replace("lazy", "")),
    "NFKC": lambda: changed(normalizer=normalizers.NFKC()),
    "blanks swallowed": blanks_swallowed,
    "unknown characters dropped": no_bytes,
    "words": lambda: Core(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "unigram": lambda: Core(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str) -> None:
    core = BOUNDED[name]()
    per_token = text_per_token(json.loads(core.to_str()))
    assert per_token is not None

    @given(st.text() | st.text(st.sampled_from("the é가ㄱ ̊A\u1fef\u212b<>"), max_size=200) | st.sampled_from(WORDS))
    def check(text: str) -> None:
        ids = core.encode(text, add_special_tokens=False).ids
        assert len(text.encode()) <= per_token * len(ids)

    check()


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_certain_where_text_can_vanish(name: str) -> None:
    assert text_per_token(json.loads(UNBOUNDED[name]().to_str())) is None


def test_normalizers_shorten_no_character_more_than_the_table_says() -> None:
    for point in range(0x110000):
        if not 0xD800 <= point < 0xE000:
            size, decomposed = len(chr(point).encode()), len(unicodedata.normalize("NFD", chr(point)).encode())
            assert size <= 3 * decomposed <= 9 * size


def test_the_longest_token_sets_the_bound(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = Tokenizer(tmp_path)
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    assert tokenizer.least_tokens("x" * (10 * longest)) == 10
    assert tokenizer.least_tokens("x" * (10 * longest) + "é") == 11
    assert tokenizer.least_tokens("") == 0
