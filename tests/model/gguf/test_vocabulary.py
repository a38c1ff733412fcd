"""Tokenizers from metadata: splitting of text before merges, Llama 2's scheme, and tokens that begin and end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from hackkv.model.gguf.header import GgufHeader, TensorEntry
from hackkv.model.gguf.vocabulary import SPLITTINGS, vocabulary_of
from hackkv.tokenizer import Tokenizer

TEXT = "It's 1984,  12345 naïve cafés:\n\n  x = y/2 日本語 😀"
CUTS = {
    "gpt-2": ["It", "'s", " 1984", ",", " ", " 12345", " naïve", " cafés"],
    "smollm": ["It", "'s", " ", "1", "9", "8", "4", ",", "  ", "1", "2", "3", "4", "5", " naïve", " cafés"],
    "llama-bpe": ["It", "'s", " ", "198", "4", ",", " ", " ", "123", "45", " naïve", " cafés"],
    "qwen2": ["It", "'s", " ", "1", "9", "8", "4", ",", " ", " ", "1", "2", "3", "4", "5", " naïve", " cafés"],
    "tekken": ["It", "'s", " ", "1", "9", "8", "4", ",", " ", " ", "1", "2", "3", "4", "5", " naïve", " cafés"],
}


def header(tokens: list[str], **fields: Any) -> GgufHeader:
    embed = TensorEntry("token_embd.weight", GGMLQuantizationType.F32, (len(tokens), 8), 0, 32 * len(tokens))
    metadata = {"tokenizer.ggml.tokens": tokens, **{f"tokenizer.ggml.{name}": value for name, value in fields.items()}}
    return GgufHeader(Path("model.gguf"), metadata, {"token_embd.weight": embed})


@pytest.mark.parametrize("name", CUTS)
def test_text_is_cut_as_the_file_says(name: str) -> None:
    splitter = SPLITTINGS[name].build()
    alphabet = "".join(piece for piece, _ in splitter.pre_tokenize_str(TEXT))
    found = [TEXT[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(TEXT)]
    assert found[: len(CUTS[name])] == CUTS[name]
    assert "".join(found) == TEXT
    assert " " not in alphabet, "pieces are spelled in GPT-2's byte alphabet"


def sentencepiece(**fields: Any) -> GgufHeader:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    scores = [0.0] * 259 + [-6.0, -5.0, -4.0, -2.0, -1.0, -3.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 6
    base = {"model": "llama", "scores": scores, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2}
    return header(pieces, **{**base, **fields})


def built(found: GgufHeader, folder: Path) -> Tokenizer:
    vocabulary_of(found).core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(folder)


def test_llama_2_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = built(sentencepiece(), tmp_path)
    ids = tokenizer.encode("ab é")
    core = tokenizer._core
    assert [core.id_to_token(i) for i in ids] == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab é"
    assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("fields", "around"),
    [
        ({"add_bos_token": False}, []),
        ({"add_eos_token": True}, [1, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [2]),
        ({}, [1]),
    ],
)
def test_what_begins_and_ends_a_text(fields: dict[str, Any], around: list[int], tmp_path: Path) -> None:
    assert built(sentencepiece(**fields), tmp_path).encode("") == around


def test_no_space_is_put_first_where_the_file_wants_none(tmp_path: Path) -> None:
    tokenizer = built(sentencepiece(add_space_prefix=False, add_bos_token=False), tmp_path)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert [tokenizer._core.id_to_token(i) for i in tokenizer.encode("ab")] == ["ab"]
