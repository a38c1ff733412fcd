"""Makes the secrets of a compose cluster, each a file in a folder. Existing files are left alone."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

NAMES = ("internal_token", "api_key", "grafana_password")
READABLE_BY_GROUP = 0o440


def main(folder: Path) -> None:
    """Write every missing secret to `folder`, readable by its owner and group."""
    for name in NAMES:
        path = folder / name
        if path.exists():
            continue
        unfinished = path.with_suffix(".new")
        unfinished.touch(mode=0o600)
        unfinished.write_text(secrets.token_urlsafe(32), encoding="ascii")
        unfinished.chmod(READABLE_BY_GROUP)
        unfinished.rename(path)
        print(f"made {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
