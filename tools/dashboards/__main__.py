"""`python -m tools.dashboards`: write every dashboard's JSON to deploy/grafana/dashboards."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.dashboards.boards import BOARDS
from tools.dashboards.charts import Board

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"


def render(board: Board) -> str:
    """A dashboard as the file that Grafana loads."""
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


def main() -> None:
    """Write the files."""
    for board in BOARDS:
        path = FOLDER / f"{board.name}.json"
        path.write_text(render(board), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
