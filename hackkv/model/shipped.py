"""Where a model's files are: a folder, a hub name, or the model that ships with hackkv."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from hackkv.errors import CheckpointError
from hackkv.model.tiny import Tiny, write_tiny

SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
RANDOM_NOTE = "the shipped model has not landed; serving random weights"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")

RANDOM_MODEL = Tiny(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=128, ffn=512, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint on this machine. `note` is something the operator should see, or empty."""

    path: Path
    name: str
    note: str = ""


def find_model(name: str) -> ModelFolder:
    """Resolve `name`: empty, a folder, or `org/model` on the hub (cached or downloaded).

    Raises `CheckpointError` if there is no such folder, or the hub cannot deliver.
    """
    if not name:
        return shipped_model(SHIPPED, cache_folder())
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFolder(path, path.resolve().name)
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder")
    return ModelFolder(_download(name), name)


def shipped_model(shipped: Path, cache: Path) -> ModelFolder:
    """The model in folder `shipped`, or until there is one, a random one that is made once in `cache`."""
    if (shipped / "config.json").is_file():
        return ModelFolder(shipped, "hackkv-shipped")
    return ModelFolder(_random_model(cache / "random-v1"), "hackkv-random", RANDOM_NOTE)


def cache_folder() -> Path:
    """hackkv's folder under the user's cache directory, as the XDG base directory specification places it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hackkv"


def _random_model(folder: Path) -> Path:
    """Make the random checkpoint if it is not there. Several processes may do so at once: the first rename wins."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as made:
            write_tiny(Path(made) / "model", RANDOM_MODEL)
            with contextlib.suppress(FileExistsError):
                (Path(made) / "model").rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    return folder


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, HFValidationError) as error:
        # OSError covers all of it: no network, offline mode without a cached copy, no such repository, gated.
        raise CheckpointError(f"{name}: no such folder, and the hub did not deliver it: {error}") from error
