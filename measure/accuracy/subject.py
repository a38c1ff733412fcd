"""The subject of a measurement: a checkpoint, its tokenizer, the tasks' phrases in its tokens, and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import EXACT_CODEC
from hackkv.model.worker import Unloaded, Worker, load_worker, model_folder, plan_worker
from hackkv.tokenizer import BROKEN, Tokenizer
from measure.accuracy.data import DatasetRecord
from measure.accuracy.text import Document, held_out
from measure.tasks import Ids, Phrases, join

STAND_IN = " word"


@dataclass(frozen=True)
class Subject:
    """A loaded model with everything that the tasks need. Immutable, so threads may share it."""

    worker: Worker
    model: ModelConfig
    tokenizer: Tokenizer
    phrases: Phrases
    documents: tuple[Document, ...]
    source: str
    """A description of where the held-out text comes from."""
    records: tuple[DatasetRecord, ...] = ()

    def plan(self, codec: CodecConfig) -> Unloaded:
        """The same checkpoint with another codec and kernels of its own, for one thread; not loaded yet."""
        return plan_worker(self.model, codec)

    def load(self, planned: Unloaded) -> Worker:
        """A planned worker, loaded. Weights are shared unless the codec folds something into them."""
        model = planned.load() if planned.codec.prepares_weights else self.worker.model
        return replace(
            self.worker,
            model=model,
            codec=planned.codec,
            backend=planned.backend,
            fingerprint=planned.fingerprint(),
            kernels=planned.kernels,
        )

    def with_codec(self, codec: CodecConfig) -> Worker:
        """A worker with another codec, planned and loaded."""
        return self.load(self.plan(codec))

    def encode(self, text: str) -> Ids:
        """Ids of `text` alone."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)

    def decode(self, ids: Ids) -> str:
        """Text of ids."""
        return self.tokenizer.decode(ids.tolist())

    @cached_property
    def prefix(self) -> Ids:
        """Tokens that the checkpoint puts before every text, such as a begin-of-sequence token."""
        return np.array(self.tokenizer.encode(""), np.int64)

    @cached_property
    def filler(self) -> Ids:
        """All held-out text as one stream."""
        end = self.tokenizer.bos_id
        between = np.array([] if end is None else [end], np.int64)
        return join(*(part for document in self.documents for part in (self.encode(document.text), between)))


def load_subject(model: ModelConfig, records: Sequence[DatasetRecord] = ()) -> Subject:
    """Load the checkpoint, once for all rows. Raises `ConfigError` or `CheckpointError`."""
    folder = model_folder(model)
    model = model.model_copy(update={"path": str(folder.path)})
    worker = load_worker(model, CodecConfig(name=EXACT_CODEC))
    tokenizer = Tokenizer(folder.path)
    text = held_out(folder.path)
    named = replace(worker, name=folder.name)
    made = build_phrases(tokenizer)
    return Subject(named, model, tokenizer, made, text.documents, text.source, tuple(records))


def build_phrases(tokenizer: Tokenizer) -> Phrases:
    """The tasks' phrases. If the vocabulary has too few whole words (a test's, say), any token serves as a word."""
    vocab = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    try:
        return Phrases.build(encode, vocab, tokenizer.special_ids)
    except ValueError:
        stand_ins = [STAND_IN if text and BROKEN not in text else "" for text in vocab]
        return Phrases.build(encode, stand_ins, tokenizer.special_ids)
