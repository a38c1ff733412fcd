"""Patches that make Triton's interpreter faster. Results do not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any


def patch_once(interpreter: Any) -> None:
    """Let `interpreter`, Triton's module of that name, patch its language once per launch and module of kernels.

    A launch replaces every builtin by one that computes on the host, and restores the old ones when it ends. In
    between, Triton searches its language again at each call of a device function, hundreds of times per launch, and
    finds no builtin to replace: what a call sees depends on its module alone.
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
            return None  # calls of device functions restore nothing
        seen.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang = patched


def remember_types(interpreter: Any) -> None:
    """Let `interpreter` make the description of a type of values once per type.

    Every operation makes a result with a type. For each result the interpreter makes anew: the type's name, the product
    of its shape, a constant of the language for each side, and a table of numpy's types. No code changes these objects.
    """
    language: Any = interpreter.tl
    numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
    block: Callable[..., None] = language.block_type.__init__
    blocks = dict[tuple[object, ...], dict[str, Any]]()

    @cache
    def plain(name: str) -> Any:
        return numpy_type(language.dtype(name))

    @cache
    def sides(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return language.tuple([language.constexpr(side) for side in shape]), language.constexpr(math.prod(shape))

    def numpy_type_of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return plain(element.name) if type(element) is language.dtype else numpy_type(kind)

    def block_of(made: Any, element: Any, shape: Any) -> None:
        if type(element) is not language.dtype:
            block(made, element, shape)
            return
        key = element.name, *(side.value if isinstance(side, language.constexpr) else side for side in shape)
        if key not in blocks:
            block(made, element, shape)
            blocks[key] = dict(vars(made))
        vars(made).update(blocks[key])

    def tensor_of(made: Any, handle: Any, kind: Any) -> None:
        made.handle, made.type, made.dtype = handle, kind, kind.scalar
        made.shape, made.numel = sides(tuple(kind.shape) if kind.is_block() else ())

    interpreter._get_np_dtype = numpy_type_of
    language.block_type.__init__ = block_of
    language.tensor.__init__ = tensor_of
