"""A call of a function as Python writes it, without running anything."""

from __future__ import annotations

import ast
import json
from typing import Any

from router.api.tools.machine import NoCall

_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError)


def python_call(text: str) -> tuple[str, str]:
    """Name and arguments (JSON) of a call in Python with keywords and literals only. Raises `NoCall`."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise NoCall
        arguments = {str(word.arg): _literal(word.value) for word in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except _FAULTS as error:
        raise NoCall from error


def _literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's names for constants are known too."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(ast.literal_eval(key)): _literal(value) for key, value in _pairs(node)}
    value = ast.literal_eval(node)
    if isinstance(value, str):  # JSON may write one character as two surrogates
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, int | float | None):
        raise NoCall
    return value


def _pairs(node: ast.Dict) -> list[tuple[ast.expr, ast.expr]]:
    if None in node.keys:
        raise NoCall
    return [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
