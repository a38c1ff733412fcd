"""Questions about texts and tokens, which need no node: POST /tokenize and /detokenize, as vLLM has them.

Answers are made where bodies are parsed (`router.api.prompts`), so a long one does not hold up the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from hackkv.errors import RequestError
from hackkv.tokenizer import Tokenizer
from router.api.conversation import Conversations
from router.api.fields import Ignored, NullIs, Refused, fault
from router.api.schema import MAX_MESSAGES, ChatRequest, Message, TokenId
from router.api.strict import Body
from router.api.tokenize import Bounds, chat, check_prompt, check_token_ids, encode
from router.api.tools.fields import MAX_TOOLS, Tool

MAX_TEXT: Final = 64 << 20
"""The most characters that /detokenize answers with."""


class Question(Body):
    """A body that is answered without a node."""

    def answer(self, conversations: Conversations, bounds: Bounds) -> dict[str, Any]:
        """The answer. Raises `RequestError` naming the field."""
        raise NotImplementedError


class TokenizeRequest(Question):
    """POST /tokenize: of a text, or of a conversation as the chat template renders it."""

    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, strict=False)] | None = None
    add_special_tokens: bool | None = None
    """Those that the checkpoint puts around every text; as a rule with `prompt`, and never with `messages`."""
    add_generation_prompt: Annotated[bool, NullIs(True)] = True
    continue_final_message: Annotated[bool, NullIs(False)] = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool, NullIs(False)] = False
    """Adds `token_strs`, each token as the vocabulary has it."""
    chat_template: Annotated[Any, Refused("the checkpoint's own template is used")] = None
    mm_processor_kwargs: Annotated[Any, Ignored("there are no pictures")] = None
    media_io_kwargs: Annotated[Any, Ignored("there are no pictures")] = None
    content: Annotated[Any, Refused("use prompt")] = None
    add_special: Annotated[Any, Refused("use add_special_tokens")] = None
    parse_special: Annotated[Any, Refused("special tokens in a text are always read as such", (True,))] = None
    with_pieces: Annotated[Any, Refused("use return_token_strs", (False,))] = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            fault("and messages exclude each other, and one of them is required", "prompt")
        if self.messages is None and self.tools:
            fault("needs messages", "tools")
        if self.messages is not None and self.add_special_tokens:
            fault(
                "and messages exclude each other: chat templates write their own special tokens", "add_special_tokens"
            )
        return self

    def answer(self, conversations: Conversations, bounds: Bounds) -> dict[str, Any]:
        """Ids and their number."""
        tokenizer = conversations.tokenizer
        ids: Sequence[int]
        if self.prompt is not None:
            ids = encode(tokenizer, self.prompt, self.add_special_tokens is not False, bounds, "prompt")
        else:
            (ids,) = chat(conversations, self._conversation(), bounds)
        strings = [tokenizer.token_piece(token_id) for token_id in ids] if self.return_token_strs else None
        return {"count": len(ids), "max_model_len": bounds.context, "tokens": list(ids), "token_strs": strings}

    def _conversation(self) -> ChatRequest:
        return ChatRequest(
            messages=self.messages or (),
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(Question):
    """POST /detokenize."""

    tokens: tuple[TokenId, ...]

    def answer(self, conversations: Conversations, bounds: Bounds) -> dict[str, Any]:
        """The text, special tokens written out."""
        tokenizer = conversations.tokenizer
        check_prompt(len(self.tokens), bounds, "tokens")
        check_token_ids(tokenizer, self.tokens, "tokens")
        _check_text(tokenizer, self.tokens)
        return {"prompt": tokenizer.decode(self.tokens, skip_special_tokens=False)}


QUESTIONS: Final[tuple[type[Question], ...]] = (TokenizeRequest, DetokenizeRequest)


def answer_question(conversations: Conversations, body: Question, bounds: Bounds) -> bytes:
    """The answer as JSON. Raises `RequestError` naming the field."""
    return json.dumps(body.answer(conversations, bounds), separators=(",", ":")).encode()


def _check_text(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Refuse ids whose text would be out of all proportion, before it is made."""
    if sum(len(tokenizer.token_bytes(token_id)) for token_id in ids) > MAX_TEXT:
        raise RequestError(f"tokens: their text is longer than {MAX_TEXT} bytes", "tokens")
