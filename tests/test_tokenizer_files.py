"""Tokenizers in all file forms of checkpoints are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hackkv.errors import CheckpointError
from hackkv.tokenizer import Tokenizer
from tests.test_tokenizer import byte_level

TEXT = "<s>the quick <tool> <extra>brown </s> <pad><x>"
ADDED = {"content": "<tool>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
FORMS: dict[str, dict[str, Any]] = {
    "nothing beside it": {},
    "names": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}},
    "a name that is no token yet": {"tokenizer_config.json": {"bos_token": "<s>", "pad_token": "<pad>"}},
    "tokens as objects": {
        "tokenizer_config.json": {"bos_token": {"__type": "AddedToken", **ADDED, "content": "<s>"}},
    },
    "added tokens": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "0": {**ADDED, "content": "<s>", "special": True},
                "300": {**ADDED, "special": True},
                "301": {**ADDED, "content": "<x>", "special": False},
            },
        },
    },
    "more special tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<extra>", "<tool>"]}},
    "more special tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<extra>"}}},
    "a token of the model's own": {"tokenizer_config.json": {"image_token": "<x>"}},
    "the old map": {
        "tokenizer_config.json": {},
        "special_tokens_map.json": {"bos_token": "<s>", "pad_token": {**ADDED, "content": "<pad>"}},
    },
    "one template of several": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
        },
    },
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("files", FORMS.values(), ids=FORMS)
def test_a_tokenizer_is_the_one_that_transformers_reads(tmp_path: Path, files: dict[str, Any]) -> None:
    ours = Tokenizer(write(tmp_path, files))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.has_chat_template == (theirs.chat_template is not None)
    for token_id in range(296, len(theirs)):
        assert ours.decode([token_id], False) == theirs.decode([token_id], skip_special_tokens=False)


def test_a_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"chat_template": "config"}})
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": ""}])) == "file"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "tokenizer_config.json: Expecting"),
        ("[]", "tokenizer_config.json: expected a JSON object"),
        ('{"chat_template": 1}', "tokenizer_config.json: chat_template: expected text"),
        ('{"chat_template": "{% nothing %}"}', "the chat template does not compile"),
        ('{"bos_token": 3}', "tokenizer_config.json: a token is not understood"),
        ('{"added_tokens_decoder": []}', "a token is not understood"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, named: str) -> None:
    write(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=named):
        Tokenizer(tmp_path)
