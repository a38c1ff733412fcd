"""Gathers the training text: CPython's library sources and CPython's documentation.

Every machine with Python has the former; `apt-get download` brings the latter. Both are under the PSF licence. Whole
files are held out, chosen by the hash of their names, so that the split is the same on every machine.
"""

import hashlib
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.train_small.settings import CorpusSettings

_ROLE = re.compile(r":(?:[a-z]+:){1,2}`[!~]?([^`<]+?)(?:\s*<[^`>]+>)?`")
_HIGHEST_BYTE = 0x2000


@dataclass(frozen=True)
class Document:
    """A file: its name inside its source, and its text."""

    name: str
    text: str


def gather(settings: CorpusSettings, work: Path) -> tuple[list[Document], list[Document]]:
    """Documents for training and held-out documents; downloads the documentation into `work` once."""
    train: list[Document] = []
    held_out: list[Document] = []
    seen: set[str] = set()
    for document in (*_library(settings), *_documentation(settings, work)):
        digest = hashlib.sha256(document.text.encode()).hexdigest()
        if digest in seen or len(document.text) < settings.min_chars:
            continue
        seen.add(digest)
        share = int(hashlib.sha256(document.name.encode()).hexdigest()[:8], 16) / 2**32
        (held_out if share < settings.held_out else train).append(document)
    return train, held_out


def _library(settings: CorpusSettings) -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(part in settings.skip for part in name.split("/")):
            yield from _read(path, name)


def _documentation(settings: CorpusSettings, work: Path) -> Iterator[Document]:
    unpacked = work / settings.doc_package
    if not unpacked.exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", settings.doc_package], cwd=work, check=True)
        (archive,) = work.glob(f"{settings.doc_package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    for path in sorted(unpacked.rglob("*.rst.txt")):
        for document in _read(path, path.relative_to(unpacked).as_posix()):
            yield Document(document.name, plain(document.text))


def _read(path: Path, name: str) -> Iterator[Document]:
    """The file, unless it is not UTF-8 or is a table of odd characters."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if sum(ord(c) > _HIGHEST_BYTE for c in text) <= len(text) // 100:
        yield Document(name, text.replace("\r\n", "\n").expandtabs(8))


def plain(text: str) -> str:
    """Reduce the roles of reStructuredText (:class:`x`) to plain literals, which read better in generated text."""
    return _ROLE.sub(r"``\1``", text)
