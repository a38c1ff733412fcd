"""Text to token ids and back, for one checkpoint folder.

The `tokenizers` library encodes, `chat_template` renders conversations, `tokenizer_files` reads the folder. Neither
torch nor transformers is loaded.

Two small machines turn a growing list of ids into text that can be sent as it comes:

- `Detokenizer` never shows half a character. (`tokenizers.decoders.DecodeStream` was tried: where ids are not
  whole UTF-8, which sampled text does contain, its pieces do not add up to the decoded whole.)
- `StopMatcher` finds stop strings across token boundaries and holds back what could still become one.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from hackkv.chat_template import ChatTemplate
from hackkv.errors import CheckpointError, RequestError
from hackkv.token_sizes import BYTE_OF_CHAR, text_per_token
from hackkv.tokenizer_files import read_tokenizer

BROKEN = "\ufffd"
"""The character that a decoder shows for bytes that are not (yet) UTF-8."""

MAX_HELD = 32
"""The most tokens that wait for a character to complete; after that, bytes that are not UTF-8 show as U+FFFD."""

MAX_HELD_CHARS = 3
"""A UTF-8 character is at most 4 bytes, so at most 3 replacement characters at the end can still change."""

_RESERVED = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "tokenizer_kwargs"}
)
"""Template variables that clients cannot set."""

_Utf8 = getincrementaldecoder("utf-8")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Raises `CheckpointError` naming the file if the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder")
        files = read_tokenizer(folder)
        self._core = files.core
        # A tokenizer.json may carry the padding and truncation of its training run.
        self._core.no_truncation()
        self._core.no_padding()
        self.folder = folder
        self._chat = _compiled(folder, files.chat_template, files.named)
        bos = files.named.get("bos_token")
        self.bos_id: int | None = self._core.token_to_id(bos) if bos is not None else None
        self.vocab_size = _vocab_size(folder, self._core.get_vocab_size(with_added_tokens=True))
        self.special_ids = frozenset(
            token_id for token_id, token in self._core.get_added_tokens_decoder().items() if token.special
        )
        decoders = _decoder_types(self._core.decoder)
        self._byte_level = "ByteLevel" in decoders
        self._text_per_token = text_per_token(json.loads(self._core.to_str()))
        self._token_bytes = lru_cache(maxsize=65536)(self._compute_bytes)
        self.decoded_bytes = lru_cache(maxsize=65536)(self._decode_bytes) if decoders == {"ByteLevel"} else None
        """The bytes that each token adds to the decoded text, where tokens are bytes and no more; else None."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint can serve chat."""
        return self._chat is not None

    @property
    def chat_template(self) -> str:
        """The template's text; empty if there is none."""
        return self._chat.source if self._chat is not None else ""

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so, if there is one."""
        token_id: int | None = self._core.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` those that the checkpoint puts around every text too.

        Other threads run meanwhile.
        """
        # `encode` would hold the GIL for its whole run and block every thread of the process.
        ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def starts(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The character offset at which each token of `encode` begins. A token begins where the previous one ends.
        Tokens that share a character begin where it begins. Special tokens around the text have no length."""
        encoding = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        starts, end = list[int](), 0
        for first, last in encoding.offsets:
            starts.append(min(first, end) if last > first else end)
            end = max(end, last)
        return starts

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, found without tokenizing it; 0 if nothing is certain."""
        if self._text_per_token is None:
            return 0
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-size // self._text_per_token)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the checkpoint's own format; see `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt, continue_final_message, template_arguments, tools)
        # Templates write their own special tokens.
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """A conversation as the text that the model was trained on, special tokens written out.

        Raises `RequestError` if there is no chat template or if it refuses the conversation.
        """
        if taken := _RESERVED & (template_arguments or {}).keys():
            raise RequestError(f"{min(taken)} may not be given to the chat template", param="chat_template_kwargs")
        if self._chat is None:
            raise RequestError(
                f"{self.folder.name} has no chat template (no chat_template.jinja, none in tokenizer_config.json); "
                "use /v1/completions",
                param="messages",
            )
        try:
            return self._chat.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                arguments=template_arguments or {},
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refused the conversation: {error}", param="messages") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 show as U+FFFD."""
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, as OpenAI's `logprobs` report them."""
        return self._token_bytes(token_id)

    def token_piece(self, token_id: int) -> str:
        """One token as the vocabulary writes it; empty if it has no such token."""
        return str(self._core.id_to_token(token_id) or "")

    def token_text(self, token_id: int) -> str:
        """One token by itself as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _decode_bytes(self, token_id: int) -> bytes:
        """The bytes of a token as `ByteLevel` decodes it: its characters are bytes, unless one stands for no byte."""
        piece = str(self._core.id_to_token(token_id) or "")
        if all(char in BYTE_OF_CHAR for char in piece):
            return bytes(BYTE_OF_CHAR[char] for char in piece)
        return piece.encode()

    def _compute_bytes(self, token_id: int) -> bytes:
        piece = self._core.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level and all(char in BYTE_OF_CHAR for char in piece) and token_id not in self.special_ids:
            return bytes(BYTE_OF_CHAR[char] for char in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("▁", " ").encode()


class Detokenizer:
    """Turns tokens into text one by one. The pieces put together are the decoded whole."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens are skipped on demand, all but those in `shown`."""
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        of_bytes = tokenizer.decoded_bytes
        self._growing = _GrowingWindow(tokenizer) if of_bytes is None else _GrowingBytes(of_bytes)

    def push(self, token_id: int) -> str:
        """The text that this token completes, maybe none."""
        return "" if token_id in self._skipped else self._growing.push(token_id)

    def flush(self) -> str:
        """The rest, when no more tokens come: an incomplete character shows as U+FFFD."""
        return self._growing.flush()


class _GrowingBytes:
    """Text of tokens that are bytes and no more."""

    def __init__(self, of_bytes: Callable[[int], bytes]) -> None:
        self._of_bytes = of_bytes
        self._decode = _Utf8("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._of_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class _GrowingWindow:
    """Text of any tokens.

    Decoders look back (a leading space is dropped only at the very start), so the window that is decoded keeps, as
    context, the tokens of the last whole characters that went out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0
        """Tokens at the window's start that are there for context only."""
        self._shown = 0
        """Characters of the window's text that are out."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text()
        tail = len(text) - len(text.rstrip(BROKEN))
        held = tail if len(self._window) - self._context <= MAX_HELD else min(tail, MAX_HELD_CHARS)
        delta = self._show(text, len(text) - held)
        if delta and not held:
            del self._window[: self._context]
            self._context = len(self._window)
            self._shown = len(self._text())
        return delta

    def flush(self) -> str:
        text = self._text()
        return self._show(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _show(self, text: str, until: int) -> str:
        delta = text[self._shown : until]
        self._shown = max(self._shown, until)
        return delta


class StopMatcher:
    """Cuts a growing text before the first stop string. No stop strings: everything passes through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now safe to show; once `matched` is set nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self._held, self.matched = "", found[1]
            return text[: found[0]]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def release(self) -> str:
        """The text held back so far, when no more text comes (or while stops do not count yet)."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _compiled(folder: Path, source: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    try:
        return None if source is None else ChatTemplate(source, special_tokens)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{folder}: the chat template does not compile: {error}") from error


def _decoder_types(decoder: Any) -> set[str]:
    """Names of a decoder and of the decoders in it, from its serialized form."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return {part.get("type", "") for part in (state, *state.get("decoders", ()))}


def _vocab_size(folder: Path, tokens: int) -> int:
    """The number of ids with an embedding, from config.json if there is one: a tokenizer may know fewer or more."""
    path = folder / "config.json"
    if not path.is_file():
        return tokens
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else tokens
