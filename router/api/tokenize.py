"""From the bytes of a request's body to a checked body and token ids: pure functions, which never wait.

They take time in proportion to the body. A small body is taken on the event loop, a large one in a process of its own
(`router.api.parser`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from hackkv.errors import RequestError
from hackkv.tokenizer import Tokenizer
from router.api.conversation import Conversations
from router.api.errors import HTTPError
from router.api.faults import from_validation
from router.api.fields import STRICT
from router.api.retold import Retold
from router.api.schema import ChatRequest, CompletionRequest
from router.api.strict import Body, Data, Prompted

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one HTTP request."""

    prompt_tokens: int
    """The most tokens of each prompt."""
    sequences: int
    """Prompts times `n`."""
    context: int | None = None
    """Tokens of a prompt and its output together; None while no node can say."""


@dataclass(frozen=True, slots=True)
class Parsed(Generic[BodyT]):
    """A checked body and the token ids of its prompts, in order.

    A body that was parsed in another process has empty texts where its prompts were, unless the answer repeats them.
    """

    body: BodyT
    prompts: list[tuple[int, ...]]


def validate(kind: type[BodyT], data: Data, model_name: str, strict: bool) -> BodyT:
    """A body of that kind; if `strict`, without hints that would be ignored.

    Raises `RequestError` naming the field, or `HTTPError` 404 for another model's name.
    """
    try:
        body = kind.model_validate_json(data, context=STRICT if strict else None)
    except ValidationError as error:
        raise from_validation(error, kind) from error
    if body.model not in (None, model_name):
        message = f"the model {body.model!r:.200} does not exist; this is {model_name!r}"
        raise HTTPError(404, message, "model_not_found", "model")
    return body


def tokenize(conversations: Conversations, body: Prompted, bounds: Bounds) -> list[tuple[int, ...]]:
    """Token ids of each prompt of a body. Raises `RequestError` naming the field.

    A text that cannot fit is refused before it is tokenized, as far as the tokenizer can tell
    (`Tokenizer.least_tokens`).
    """
    if isinstance(body, Retold):
        return chat(conversations, body.chat(), bounds)
    return _TOKENIZE[type(body)](conversations, body, bounds)


def check_token_ids(tokenizer: Tokenizer, ids: Collection[int], param: str) -> None:
    """Raises `RequestError` if the model lacks one of the tokens, and says where it stands in a sequence."""
    size = tokenizer.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= size):
        index, bad = next((index, token) for index, token in enumerate(ids) if not 0 <= token < size)
        where = f" at index {index}" if isinstance(ids, Sequence) else ""
        raise RequestError(f"{param}: {bad}{where} is not a token id (0 to {size - 1})", param)


def check_prompt(tokens: int, bounds: Bounds, param: str, least: str = "") -> None:
    """Raises `RequestError` if a prompt has too many tokens; `least` is "at least " if there may be more of them."""
    if tokens > bounds.prompt_tokens:
        raise RequestError(
            f"{param} has {least}{tokens} tokens; this model serves at most {bounds.prompt_tokens}", param
        )


def _completion(conversations: Conversations, body: CompletionRequest, bounds: Bounds) -> list[tuple[int, ...]]:
    """Token ids of each prompt. Ids that the client chose are checked. An empty prompt becomes BOS if there is one."""
    tokenizer = conversations.tokenizer
    _check_sequences(len(body.prompt) * body.n, bounds)
    encoded = []
    for nth, prompt in enumerate(body.prompt):
        param = "prompt" if len(body.prompt) == 1 else f"prompt[{nth}]"
        if isinstance(prompt, str):
            ids = tuple(encode(tokenizer, prompt, body.add_special_tokens, bounds, param))
        else:
            check_prompt(len(prompt), bounds, param)
            check_token_ids(tokenizer, prompt, param)
            ids = prompt
        encoded.append(ids or _bos(tokenizer))
    return encoded


def chat(conversations: Conversations, body: ChatRequest, bounds: Bounds) -> list[tuple[int, ...]]:
    """Token ids of a conversation, alone in a list."""
    tokenizer = conversations.tokenizer
    _check_sequences(body.n, bounds)
    messages, tools = conversations.prompt(body)
    text = tokenizer.render_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_arguments=body.chat_template_kwargs or {},
        tools=tools,
    )
    # Templates write their own special tokens.
    ids = encode(tokenizer, text, False, bounds, "messages")
    if not ids:
        raise RequestError("the chat template made an empty prompt of this conversation", "messages")
    return [tuple(ids)]


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, bounds: Bounds, param: str) -> list[int]:
    """Token ids of a text. Raises `RequestError` naming `param` if there are too many."""
    check_prompt(tokenizer.least_tokens(text), bounds, param, "at least ")
    ids = tokenizer.encode(text, add_special_tokens)
    check_prompt(len(ids), bounds, param)
    return ids


def _bos(tokenizer: Tokenizer) -> tuple[int]:
    if tokenizer.bos_id is None:
        raise RequestError("the prompt is empty, and this model has no token that begins a text", "prompt")
    return (tokenizer.bos_id,)


def _check_sequences(count: int, bounds: Bounds) -> None:
    if count > bounds.sequences:
        raise RequestError(f"{count} sequences asked for at once; at most {bounds.sequences}", "n")


_TOKENIZE: Final[dict[type[Prompted], Callable[[Conversations, Any, Bounds], list[tuple[int, ...]]]]] = {
    CompletionRequest: _completion,
    ChatRequest: chat,
}
"""Functions that make token ids of the prompts of each kind of body."""
