"""What was measured once: a small file for each model, codec, kernels and text, in the user's cache folder.

A file is written beside its place and renamed when it is on the disk, under a lock: the nodes of a machine measure
once. What cannot be read, or tells of something else, is measured again and replaced. Files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path
from pydantic import TypeAdapter, ValidationError

from hackkv.nodes import CodecLoss

log = logging.getLogger(__name__)

Key = tuple[tuple[str, str], ...]
"""Everything that a measurement depends on, as named fields."""

_LOSS = TypeAdapter(CodecLoss)


def store_root() -> Path:
    """The folder that holds what was measured for this user."""
    return user_cache_path("hackkv") / "codec-loss"


def remembered(key: Key, measure: Callable[[], CodecLoss]) -> CodecLoss:
    """What was measured for `key`, or what `measure` says now. Several processes may ask at once: one measures.

    Where the folder cannot be written the log says so, and every process measures for itself.
    """
    path = store_root() / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"
    if (found := _read(path, key)) is not None:
        return found
    with contextlib.ExitStack() as lock:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.enter_context(FileLock(f"{path}.lock"))
        except OSError as error:
            log.warning("what a codec costs is measured at every start: %s: %s", path.parent, error.strerror or error)
            return measure()
        if (found := _read(path, key)) is not None:
            return found
        loss = measure()
        try:
            _write(path, key, loss)
        except OSError as error:
            log.warning("what a codec costs is measured at every start: %s: %s", path, error.strerror or error)
        return loss


def _text(key: Key) -> str:
    return json.dumps(key)


def _read(path: Path, key: Key) -> CodecLoss | None:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("key") != json.loads(_text(key)):
            return None
        return _LOSS.validate_python(content.get("loss"))
    except (OSError, ValueError, ValidationError):
        return None


def _write(path: Path, key: Key, loss: CodecLoss) -> None:
    """All or nothing; the caller holds the lock. NaN and infinity are written as Python's `json` reads them."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump({"key": key, "loss": _LOSS.dump_python(loss)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
