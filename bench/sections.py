"""Named sections of a page of `docs/` and of the record beside it. Each bench rewrites its own; the others stay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TITLE = "# {}\n\nEvery section is written by the command that it names, on the machine that it names.\n"


def write_section(folder: Path, name: str, text: str, data: object, page: str = "performance") -> None:
    """Write `text` between the marks of section `name` of `page`.md, and `data` under that key of `page`.json. Data of
    None leaves the record unchanged."""
    markdown, record = folder / f"{page}.md", folder / f"{page}.json"
    before = markdown.read_text() if markdown.exists() else TITLE.format(page.capitalize())
    section = f"<!-- {name} -->\n{text.strip()}\n<!-- /{name} -->\n"
    old = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- /{re.escape(name)} -->\n", re.DOTALL)
    markdown.write_text(old.sub(lambda _: section, before) if old.search(before) else f"{before}\n{section}")
    if data is not None:
        record.write_text(json.dumps({**_read(record), name: data}, indent=1) + "\n")


def read_section(folder: Path, name: str, page: str = "performance") -> Any:
    """The data that `write_section` wrote under `name`; None if there is none."""
    return _read(folder / f"{page}.json").get(name)


def _read(record: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    return known
