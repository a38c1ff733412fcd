"""JSON schemas that a guided answer must match: random ones, and some like those that applications send."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date", "time", "uuid", "ipv4", "email")
PATTERNS = ("^[A-Z]{2}[0-9]{2}$", "^(red|green|blue)$", "^x+$", "^[0-9]{4}-[0-9]{2}$")
NAMES = ("id", "name", "Größe", "a b", 'q"', "kind", "items", "x")


def random_schema(seed: int, depth: int = 3) -> Schema:
    """A random mixture of the enforced keywords. Every schema has small answers."""
    return _Maker(random.Random(seed)).root(depth)


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def root(self, depth: int) -> Schema:
        schema = self._object(depth) if self._rng.random() < 0.7 else self._any(depth)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> Schema:
        leaves = [self._string, self._number, self._enum, self._plain]
        inner = [self._object, self._array, self._union, self._reference]
        return self._rng.choice(leaves + (inner if depth else []))(depth - 1)

    def _string(self, depth: int) -> Schema:
        kind = self._rng.randrange(3)
        if kind == 0:
            return {"type": "string", "format": self._rng.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": self._rng.choice(PATTERNS), "maxLength": 20}
        least = self._rng.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + self._rng.randrange(9)}

    def _number(self, depth: int) -> Schema:
        least = self._rng.randint(-50, 50)
        bounds: Schema = {"type": self._rng.choice(["integer", "number"]), "minimum": least}
        bounds[self._rng.choice(["maximum", "exclusiveMaximum"])] = least + self._rng.randint(4, 200)
        if bounds["type"] == "integer" and self._rng.random() < 0.3:
            bounds["multipleOf"] = self._rng.choice([2, 3])
        return bounds

    def _enum(self, depth: int) -> Schema:
        values = self._rng.sample(["a", "é", 'q"\\', "", 1, -2.5, True, None, [1, "x"], {"k": 0}], k=3)
        return {"const": values[0]} if self._rng.random() < 0.3 else {"enum": values}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}

    def _object(self, depth: int) -> Schema:
        extra: bool | Schema = False
        names = self._rng.sample(NAMES, k=self._rng.randint(0, 4))
        properties = {name: self._any(depth) for name in names}
        required = [name for name in names if self._rng.random() < 0.6]
        if self._rng.random() < 0.2:  # llguidance counts properties only where all are required
            required, extra = names, {"type": "boolean"}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": extra,
            **({"maxProperties": len(names) + 1} if extra else {}),
        }

    def _array(self, depth: int) -> Schema:
        least = self._rng.randrange(2)
        schema: Schema = {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}
        if self._rng.random() < 0.2:
            schema["prefixItems"] = [self._any(0)]
        return schema

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        name = f"def{len(self._defs)}"
        self._defs[name] = {}
        self._defs[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}


REAL: dict[str, Schema] = {
    "extract a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 130},
            "email": {"type": "string", "format": "email", "maxLength": 24},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "classify": {
        "type": "object",
        "properties": {
            "label": {"type": "string", "enum": ["positive", "negative", "neutral"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["label", "confidence"],
        "additionalProperties": False,
    },
    "steps of a proof (OpenAI's guide)": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "explanation": {"type": "string", "maxLength": 16},
                        "output": {"type": "string", "maxLength": 16},
                    },
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": "string", "maxLength": 16},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    "a tree (OpenAI's guide)": {
        "type": "object",
        "properties": {
            "type": {"enum": ["div", "button"]},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        },
        "required": ["type", "children"],
        "additionalProperties": False,
    },
    "pydantic's optional": {
        "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
        "properties": {
            "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "default": None},
            "tags": {"items": {"type": "string", "maxLength": 5}, "maxItems": 2, "title": "Tags", "type": "array"},
        },
        "required": ["tags"],
        "title": "Item",
        "type": "object",
        "additionalProperties": False,
    },
    "an event": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 1, "maxLength": 12},
            "start": {"type": "string", "format": "date-time"},
            "guests": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,6}$"}, "maxItems": 2},
        },
        "required": ["title", "start", "guests"],
        "additionalProperties": False,
    },
}
