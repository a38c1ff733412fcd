"""Where a model's files are: a folder, a hub name, or the model that ships with hackkv."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from hackkv.errors import CheckpointError

SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
SHIPPED_NAME = "hackkv-small"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint on this machine, and the name that it is served under."""

    path: Path
    name: str


def find_model(name: str) -> ModelFolder:
    """Resolve `name`: empty, a folder, or `org/model` on the hub (cached or downloaded).

    Raises `CheckpointError` if there is no such folder, or the hub cannot deliver.
    """
    if not name:
        return ModelFolder(SHIPPED, SHIPPED_NAME)
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFolder(path, path.resolve().name)
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder")
    return ModelFolder(_download(name), name)


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, HFValidationError) as error:
        # OSError covers all of it: no network, offline mode without a cached copy, no such repository, gated.
        raise CheckpointError(
            f"{name}: no such folder, and the hub did not deliver it: {' '.join(str(error).split())}"
        ) from error
