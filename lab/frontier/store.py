"""Tensors that take long to make, cached in a folder of the user's cache. It may be deleted at any time."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from platformdirs import user_cache_path
from safetensors.torch import load_file, save_file
from torch import Tensor


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the option --cache."""
    folder = user_cache_path("hackkv") / "frontier"
    parser.add_argument("--cache", type=Path, default=folder, metavar="DIR", help=f"default: {folder}")


def digest(windows: Iterable[Tensor]) -> str:
    """16 hexadecimal digits that name token ids, int64."""
    found = hashlib.sha256()
    for ids in windows:
        found.update(len(ids).to_bytes(8, "little") + ids.numpy().astype("<i8").tobytes())
    return found.hexdigest()[:16]


def cached(file: Path, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of `file`, which is made if it is missing. Other processes see it complete or not at all."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in make().items()}, part)
        part.replace(file)
    return load_file(file)
