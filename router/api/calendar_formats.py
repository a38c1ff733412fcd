"""Dates and times in JSON schemas: patterns that refuse what llguidance's own `format` lets through.

llguidance gives every February 29 days and every minute a second 60. Where a schema has `format` and `pattern`, a
string has to match both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
"""RFC 3339 has a year 0 too, which most calendars of programming languages lack."""
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
"""Month and day, but for February 29."""
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
"""A second 60 exists only where UTC inserts one, at the end of a month that was chosen for it. None is let through."""

PATTERNS: Final[dict[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_CLOCK}",
    "date-time": f"^{_DATE}[Tt]{_CLOCK}",
}
"""By format. Fractions and zones are left to llguidance."""

_ONE: Final = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "items", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords whose value is a schema. `not` and `if` are left out: there, to refuse more is to let more through."""
_LISTED: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose value is no schema, whatever it looks like."""


def with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a JSON schema in which every string of a format of `PATTERNS` has its pattern too."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    waiting, seen = [copy], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += _within(one, copy)
        form = one.get("format")
        if isinstance(form, str) and form in PATTERNS:
            _narrow(one, PATTERNS[form])
    return copy


def _narrow(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(rest := schema.setdefault("allOf", []), list):  # any other is refused by llguidance
        rest.append({"pattern": pattern})


def _within(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a schema consists of, and the one that it refers to."""
    for key, value in schema.items():
        found: list[Any] = []
        if key in _ONE and isinstance(value, dict):
            found = [value]
        elif key in _LISTED and isinstance(value, list):
            found = value
        elif key in _NAMED and isinstance(value, dict):
            found = list(value.values())
        elif key == "$ref" and isinstance(value, str):
            found = [_target(value, root)]
        yield from (one for one in found if isinstance(one, dict))


def _target(reference: str, root: dict[str, Any]) -> Any:
    """The schema to which a JSON pointer leads; None if it leads nowhere, out of the schema, or to a value."""
    steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.partition("#")[2].split("/")[1:]]
    if not _VALUES.isdisjoint(steps):
        return None
    found: Any = root
    for step in steps:
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
