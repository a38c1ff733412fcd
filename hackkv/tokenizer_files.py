"""The files beside tokenizer.json: special tokens, tokens that were added later, and the chat template.

Tokenizers of Hugging Face's form spread over several files; older checkpoints have other files than newer ones. Where
two files disagree, the same one wins as in transformers. transformers itself is not imported: that takes longer than a
router takes to start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from hackkv.errors import CheckpointError

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a name, under which chat templates know them."""
LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
"""Fields with more special tokens: a list, or an object by name. The first that holds something counts."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its folder describes it."""

    core: Tokenizer
    named: dict[str, str]
    """The tokens of `NAMED` that the checkpoint has."""
    chat_template: str | None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read all files of a tokenizer. Raises `CheckpointError` that names the file at fault."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint needs a fast tokenizer")
    try:
        core = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception; all of them mean a bad file
        raise CheckpointError(f"{path}: {error}") from error
    config = _object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _object(folder / "special_tokens_map.json")
    try:
        named = {name: _content(config[name]) for name in NAMED if config.get(name) is not None}
        _add_missing(core, config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: a token is not understood: {error!r}") from error
    return TokenizerFiles(core, named, _chat_template(folder, config))


def _add_missing(core: Tokenizer, config: dict[str, Any]) -> None:
    """Add what the configuration declares and tokenizer.json does not have, or has with other properties."""
    there = core.get_added_tokens_decoder()
    known = {repr(token) for token in there.values()}
    names = {token.content for token in there.values()}
    declared = {int(key): AddedToken(**_fields(entry)) for key, entry in config.get("added_tokens_decoder", {}).items()}
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in known]
    names |= {token.content for token in missing}
    specials = [config[key] for key in config if key in NAMED or (key.endswith("_token") and _is_token(config[key]))]
    listed: Any = next((config[key] for key in LISTS if config.get(key)), [])
    specials += listed.values() if isinstance(listed, dict) else listed
    for token in filter(None, specials):
        if _content(token) not in names:
            missing.append(AddedToken(**{**_fields(token), "special": True}))
            names.add(_content(token))
    if missing:
        core.add_tokens(missing)


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _content(token: Any) -> str:
    return str(token if isinstance(token, str) else token["content"])


def _fields(token: Any) -> dict[str, Any]:
    """The arguments of `AddedToken`."""
    if isinstance(token, str):
        return {"content": token}
    return {key: value for key, value in token.items() if key != "__type"}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template, from chat_template.jinja, else from tokenizer_config.json, where it may be in a list."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    given = config.get("chat_template")
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}.get("default")
    if given is not None and not isinstance(given, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template: expected text, found {given!r}")
    return given


def _object(path: Path) -> dict[str, Any]:
    """The object in the file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
