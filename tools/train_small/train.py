"""The training loop: Muon for matrices, AdamW for the rest, a length curriculum, and checkpoints for resuming.

The schedule follows the spent share of the budget, in tokens or in minutes, whichever is larger. So the curriculum and
the learning rate reach their end in time on a shared, slow machine. On a fast machine the tokens decide, and a run is
reproducible.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tools.train_small import rows
from tools.train_small.muon import Muon
from tools.train_small.settings import ModelSettings, TrainSettings


def build(model: ModelSettings) -> LlamaForCausalLM:
    """A Llama with small random weights."""
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.context,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=[0, 5],
    )
    return LlamaForCausalLM(config)


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of weight times cross-entropy."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = functional.linear(hidden, model.lm_head.weight).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum()


class Run:
    """A training run in a folder: model, optimizers, the spent share of the budget, and the log."""

    def __init__(self, folder: Path, model: ModelSettings, settings: TrainSettings) -> None:
        """Starts anew, or where `checkpoint.pt` in `folder` left off."""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.folder, self.settings = folder, settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build(model).to(self.device)  # type: ignore[arg-type]
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=settings.weight_decay),
            torch.optim.AdamW(others, lr=settings.adam_lr, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self.rates = [settings.muon_lr, settings.adam_lr]
        self.loss = torch.compile(weighted_loss, dynamic=False)
        self.step, self.tokens, self.progress = 0, 0, 0.0
        self.stopped = False
        if (folder / "checkpoint.pt").exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.progress = state["step"], state["tokens"], state["progress"]

    def save(self) -> None:
        """Write the checkpoint; a crash in between leaves the older one whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "progress": self.progress,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").replace(self.folder / "checkpoint.pt")

    def log(self, record: dict[str, Any]) -> None:
        """Append to log.jsonl."""
        with (self.folder / "log.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")

    def one_step(self, material: rows.Material) -> tuple[int, float]:
        """Take one optimizer step; return the length of its rows and the weighted mean loss."""
        settings = self.settings
        rng = np.random.default_rng((settings.seed, self.step))
        stream = settings.phase(self.progress).stream(rng.random())
        count = max(1, settings.batch_tokens // stream.length)
        ids, weights = rows.batch(rng, material, stream.mix, stream.length, count)
        micro = max(1, settings.micro_tokens // stream.length)
        scale, total = float(weights[:, 1:].sum()), 0.0
        for i in range(0, count, micro):
            ids_part = torch.from_numpy(ids[i : i + micro]).to(self.device)
            weights_part = torch.from_numpy(weights[i : i + micro]).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(self.model, ids_part, weights_part) / scale
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * settings.lr_scale(self.progress)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += ids.size
        return stream.length, total

    def stop(self, *_: object) -> None:
        """End after the current step."""
        self.stopped = True

    def train(self, material: rows.Material) -> None:
        """Train until the budget is spent, or SIGTERM or SIGINT comes. The checkpoint is written either way."""
        settings = self.settings
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.1f}%"))
        with Progress(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("training", total=1.0)
            bar.update(task, completed=self.progress)
            saved = time.monotonic()
            while self.progress < 1.0 and not self.stopped:
                begin, before = time.monotonic(), self.tokens
                length, loss = self.one_step(material)
                spent = time.monotonic() - begin
                share = (self.tokens - before) / settings.tokens
                self.progress += max(share, spent / 60 / settings.minutes)
                bar.update(task, completed=self.progress, description=f"length {length}, loss {loss:.3f}")
                self.log(
                    {"step": self.step, "tokens": self.tokens, "progress": round(self.progress, 5)}
                    | {"length": length, "loss": round(loss, 4), "seconds": round(spent, 2)}
                )
                if time.monotonic() - saved > 60 * settings.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        self.save()
