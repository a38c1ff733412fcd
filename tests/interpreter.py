"""Triton's interpreter without the half of its time that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_once(interpreter: Any) -> None:
    """Let `interpreter`, Triton's module of that name, exchange its language once for a launch and a module of kernels.

    A launch replaces every builtin by one that computes on the host, and puts the old ones back when it ends. In
    between Triton looks through its language again at each call of a device function, hundreds in a launch, and finds
    no builtin that is left; what a call sees depends on its module alone.
    """
    launch: Callable[..., None] = interpreter.GridExecutor.__call__
    patch: Callable[[Callable[..., Any]], Any] = interpreter._patch_lang
    seen = set[int]()

    def launched(executor: Any, *arguments: Any, **named: Any) -> None:
        seen.clear()
        launch(executor, *arguments, **named)

    def patched(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None  # calls of device functions put nothing back
        seen.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang = patched
