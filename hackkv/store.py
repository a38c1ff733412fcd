"""A store of measurements: a small file for each question, in the user's cache folder.

A file is written beside its place and renamed when it is on the disk, under a lock: the nodes of a machine measure
once. A file that cannot be read, or that answers another question, is replaced by a new measurement. Files may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Final, Generic, TypeVar

from filelock import FileLock
from platformdirs import user_cache_path
from pydantic import TypeAdapter, ValidationError

log = logging.getLogger(__name__)

Key = tuple[tuple[str, str], ...]
"""Everything that a measurement depends on, as named fields."""

Found = TypeVar("Found")

PASSING_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Passing(Generic[Found]):
    """A measurement that other work disturbed: it is repeated after `PASSING_S`."""

    found: Found


class Store(Generic[Found]):
    """Measurements of one kind."""

    def __init__(self, folder: str, kind: type[Found], what: str) -> None:
        """`folder` in the user's cache holds values of type `kind`; `what` names them in the log."""
        self._folder, self._kind, self._what = folder, TypeAdapter(kind), what

    @property
    def root(self) -> Path:
        """This user's folder of measurements."""
        return user_cache_path("hackkv") / self._folder

    def remembered(self, key: Key, measure: Callable[[], Found | Passing[Found]]) -> Found:
        """The stored measurement for `key`, or a new one by `measure`. Several processes may ask at once: one measures.

        Where the folder cannot be written the log says so, and every process measures for itself.
        """
        path = self.root / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(_Unknown):
            return self._read(path, key)
        with contextlib.ExitStack() as lock:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock.enter_context(FileLock(f"{path}.lock"))
            except OSError as error:
                self._warn(path.parent, error)
                return _plain(measure())
            with contextlib.suppress(_Unknown):
                return self._read(path, key)
            found = measure()
            try:
                self._write(path, key, found)
            except OSError as error:
                self._warn(path, error)
            return _plain(found)

    def _warn(self, path: Path, error: OSError) -> None:
        log.warning("%s is measured at every start: %s: %s", self._what, path, error.strerror or error)

    def _read(self, path: Path, key: Key) -> Found:
        """The measurement for `key` in the file. Raises `_Unknown` if the file holds none that still counts."""
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict) or content.get("key") != json.loads(_text(key)):
                raise _Unknown
            if not time() < content.get("until", math.inf):
                raise _Unknown
            return self._kind.validate_python(content.get("found"))
        except (OSError, TypeError, ValueError, ValidationError) as error:
            raise _Unknown from error

    def _write(self, path: Path, key: Key, found: Found | Passing[Found]) -> None:
        """Write all or nothing; the caller holds the lock. NaN and infinity are in the form of Python's `json`."""
        part = path.with_name(f"{path.name}.part")
        with part.open("w", encoding="utf-8") as file:
            content = {"key": key, "found": self._kind.dump_python(_plain(found))}
            if isinstance(found, Passing):
                content["until"] = time() + PASSING_S
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


class _Unknown(Exception):
    """No file holds the measurement."""


def _plain(found: Found | Passing[Found]) -> Found:
    return found.found if isinstance(found, Passing) else found


def _text(key: Key) -> str:
    return json.dumps(key)
