"""Secrets of the compose cluster: made once, and whole."""

from __future__ import annotations

from pathlib import Path

from deploy.make_secrets import NAMES, READABLE_BY_GROUP, main


def test_every_secret_is_made_once(tmp_path: Path) -> None:
    main(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(made) == sorted(NAMES)
    assert len(set(made.values())) == len(NAMES)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {READABLE_BY_GROUP}
    main(tmp_path)
    assert made == {path.name: path.read_text() for path in tmp_path.iterdir()}


def test_a_secret_that_was_begun_is_made(tmp_path: Path) -> None:
    """The process ended between the making of a file and its last byte."""
    (tmp_path / f"{NAMES[0]}.new").touch(mode=0o600)
    main(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    assert (tmp_path / NAMES[0]).read_text()
