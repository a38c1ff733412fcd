"""Rules for writing guided JSON: `x-guidance` of a schema tells them to llguidance, which this module does not load."""

from __future__ import annotations

from typing import Any, Final

ON_ONE_LINE: Final[dict[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON has at most one space after a comma or colon: a model cannot lose itself in white space."""


def guidance(lenient: bool) -> dict[str, Any]:
    """How JSON is written; `lenient` ignores keywords of JSON Schema that cannot be enforced."""
    return {**ON_ONE_LINE, "lenient": lenient, "coerce_one_of": lenient}
