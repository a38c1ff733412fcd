"""Checkpoints from the hub. Imported when one is asked for: the hub's client takes half a second."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from hackkv.errors import CheckpointError

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def download(name: str) -> Path:
    """The folder of `org/model`, cached or downloaded. Raises `CheckpointError` if the hub does not deliver it."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, HFValidationError) as error:
        # OSError covers all of it: no network, offline mode without a cached copy, no such repository, gated.
        raise CheckpointError(
            f"{name}: no such folder, and the hub did not deliver it: {' '.join(str(error).split())}"
        ) from error
