"""Folders for the files of a running process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "hackkv-"
LOCK: Final = "lock"
"""Locked for as long as the process lives, however it ends."""


class WorkingFolder:
    """A folder that only this user can read, until `close`. A process that is killed cannot remove its folder, so the
    next process that makes one does."""

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        # The file gets its name once it is locked: until then others leave the folder alone.
        unnamed = self.path / "unlocked"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody will remove this folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / LOCK)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a process of this user that has ended."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no working folder, not finished, or removed by another process
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its process lives
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
