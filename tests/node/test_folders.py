"""A process has its folder alone; the folder of a process that was killed is removed by the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from node.folders import LOCK, PREFIX, WorkingFolder

TIMEOUT_S = 60.0
HOLDER = """
from node.folders import WorkingFolder
folder = WorkingFolder()
(folder.path / "token").write_text("secret")
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of these tests lie in `tmp_path`, also those of child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_only_its_user_can_read_a_folder_and_its_end_removes_it() -> None:
    with closing(WorkingFolder()) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()


def test_a_folder_outlives_others_but_not_for_long_its_process() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        with closing(WorkingFolder()):
            assert (left / "token").exists()
        holder.kill()
        holder.wait(TIMEOUT_S)
    assert (left / "token").exists()
    with closing(WorkingFolder()):
        assert not left.exists()


def test_what_is_no_finished_folder_of_ours_stays(tmp_path: Path) -> None:
    unfinished, elsewhere = tmp_path / f"{PREFIX}new", tmp_path / "elsewhere"
    for folder in (unfinished, elsewhere):
        folder.mkdir()
    (elsewhere / LOCK).touch()
    (linked := tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (behind := tmp_path / f"{PREFIX}behind").mkdir()
    (behind / LOCK).symlink_to(elsewhere / LOCK)
    with closing(WorkingFolder()):
        pass
    assert unfinished.exists()
    assert behind.exists()
    assert linked.exists()
    assert (elsewhere / LOCK).exists()
