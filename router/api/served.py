"""The one model that is served, and what the routes need to serve it."""

from __future__ import annotations

from dataclasses import dataclass

from hackkv.tokenizer import Tokenizer
from router.api.defaults import SamplingDefaults
from router.api.prompts import Prompts
from router.config import DeadlinesConfig, LimitsConfig
from router.fleet.fleet import Fleet
from router.life.dispatch import Dispatcher
from router.watch.journal import Journal
from router.watch.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the routes work with."""

    name: str
    prompts: Prompts
    defaults: SamplingDefaults
    dispatcher: Dispatcher
    metrics: Metrics
    journal: Journal
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
) -> ServedModel:
    """A model over a fleet."""
    metrics = Metrics(name, fleet)
    return ServedModel(
        name,
        Prompts(tokenizer, fleet.capacity, limits, deadlines.tokenize_s),
        defaults,
        Dispatcher(fleet, metrics, deadlines, limits),
        metrics,
        Journal(fleet),
        limits.default_chat_tokens,
    )
