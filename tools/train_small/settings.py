"""The settings of the trainer's configuration file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class CorpusSettings:
    """The sources of text. `skip` names directories or files; `held_out` is a share of the files."""

    doc_package: str
    skip: tuple[str, ...]
    held_out: float
    min_chars: int


@dataclass(frozen=True)
class ModelSettings:
    """The shape of the Llama."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float


@dataclass(frozen=True)
class Stream:
    """A share of the steps. Rows have `length` tokens; their kinds are drawn by weight from `mix`."""

    share: float
    length: int
    mix: dict[str, float]


@dataclass(frozen=True)
class Phase:
    """Until the share `until` of the budget, each step draws one of the streams."""

    until: float
    streams: tuple[Stream, ...]

    def stream(self, draw: float) -> Stream:
        """The stream for `draw`, a number in [0, 1)."""
        place = draw * sum(s.share for s in self.streams)
        for stream in self.streams:
            place -= stream.share
            if place < 0:
                return stream
        return self.streams[-1]


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run. Its budget ends with the tokens or the minutes, whichever are spent first. The schedule
    follows the one of which more is spent."""

    tokens: int
    minutes: float
    batch_tokens: int
    micro_tokens: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    warmup: float
    decay_from: float
    phases: tuple[Phase, ...]
    checkpoint_minutes: float
    threads: int
    seed: int

    def phase(self, progress: float) -> Phase:
        """The phase at a share of the budget."""
        return next((p for p in self.phases if progress < p.until), self.phases[-1])

    def lr_scale(self, progress: float) -> float:
        """Linear warm-up, constant, linear decay to 2%."""
        if progress < self.warmup:
            return progress / self.warmup
        if progress < self.decay_from:
            return 1.0
        return max(0.02, (1.0 - progress) / (1.0 - self.decay_from))


@dataclass(frozen=True)
class Settings:
    """Everything in `small.yaml`."""

    corpus: CorpusSettings
    model: ModelSettings
    train: TrainSettings


def load(path: Path) -> Settings:
    """Read the YAML; an unknown or missing entry raises TypeError."""
    raw: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
    corpus, train = raw["corpus"], raw["train"]
    corpus["skip"] = tuple(corpus["skip"])
    train["phases"] = tuple(Phase(p["until"], tuple(Stream(**s) for s in p["streams"])) for p in train["phases"])
    return Settings(CorpusSettings(**corpus), ModelSettings(**raw["model"]), TrainSettings(**train))
