"""The one model that is served, and what the routes need to serve it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hackkv.tokenizer import Tokenizer
from router.api.buffered import BodyBudget
from router.api.conversation import Conversations
from router.api.defaults import SamplingDefaults
from router.api.grammars import Grammars
from router.api.prompts import PromptParser
from router.config import ChatConfig, DeadlinesConfig, LimitsConfig
from router.fleet.fleet import Fleet
from router.life.dispatch import Dispatcher
from router.watch.journal import Journal
from router.watch.metrics import Metrics

_CHAT = ChatConfig()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that is served, with all that the routes need."""

    name: str
    prompts: PromptParser
    bodies: BodyBudget
    grammars: Grammars
    conversations: Conversations
    defaults: SamplingDefaults
    dispatcher: Dispatcher
    metrics: Metrics
    journal: Journal
    writing: asyncio.Lock
    """Held by the large answer that is written now: several at once would let others wait for longer."""
    default_chat_tokens: int
    """`max_tokens` of a chat request that names none."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self.prompts.tokenizer


def serve_model(
    name: str,
    tokenizer: Tokenizer,
    fleet: Fleet,
    defaults: SamplingDefaults,
    deadlines: DeadlinesConfig,
    limits: LimitsConfig,
    chat: ChatConfig = _CHAT,
    strict: bool = False,
    journal: Journal | None = None,
) -> ServedModel:
    """A model over a fleet. If `strict`, hints that would be ignored are refused."""
    metrics, conversations = Metrics(name, fleet), Conversations(tokenizer, chat)
    return ServedModel(
        name,
        PromptParser(name, conversations, fleet.capacity, limits, deadlines.tokenize_s, strict),
        BodyBudget(limits.max_buffered_bytes, limits.max_body_bytes),
        Grammars(tokenizer.folder, deadlines.grammar_s),
        conversations,
        defaults,
        Dispatcher(fleet, metrics, deadlines, limits),
        metrics,
        journal or Journal(fleet),
        asyncio.Lock(),
        limits.default_chat_tokens,
    )
