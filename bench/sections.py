"""Named sections of `docs/performance.md` and `.json`: each bench rewrites its own and leaves the others alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

TITLE = "# Performance\n\nEvery section is written by the command that it names, on the machine that it names.\n"


def write_section(folder: Path, name: str, text: str, data: object) -> None:
    """Put `text` between the marks of section `name` of the page, and `data` under that key of the record."""
    page, record = folder / "performance.md", folder / "performance.json"
    before = page.read_text() if page.exists() else TITLE
    section = f"<!-- {name} -->\n{text.strip()}\n<!-- /{name} -->\n"
    old = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- /{re.escape(name)} -->\n", re.DOTALL)
    page.write_text(old.sub(lambda _: section, before) if old.search(before) else f"{before}\n{section}")
    known = json.loads(record.read_text()) if record.exists() else {}
    record.write_text(json.dumps({**known, name: data}, indent=1) + "\n")
