"""Refusals of pydantic as errors that name the field in the client's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from hackkv.errors import RequestError
from hackkv.spelling import did_you_mean
from router.api.fields import is_tag


def from_validation(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """The error that names the field that pydantic refused; for an unknown field, the most similar known one too.

    If a field is misspelt, it is unknown and another one is missing: the error names the unknown one.
    """
    errors = error.errors(include_url=False, include_input=False)
    first = next((each for each in errors if _misspells(each, errors[0])), errors[0])
    why, context = first["type"], first.get("ctx", {})
    if why == "json_invalid":
        reason = context["error"]
        if reason.startswith("recursion limit"):
            return RequestError(f"the body is nested too deeply: {reason}")
        return RequestError(f"the body is not valid JSON: {reason}")
    if why == "extra_forbidden":
        *place, name = first["loc"]
        parent = _path([step for step in place if not is_tag(step)])
        path = f"{parent}.{name}" if parent else str(name)
        known = [field for model in _models_at(kind, place) for field in _fields(model)]
        return RequestError(f"unknown field: {path}{did_you_mean(str(name), known, parent)}", param=path)
    path = _path([*(step for step in first["loc"] if not is_tag(step)), *context.get("where", ())])
    if not path:
        return RequestError("the body must be a JSON object")
    return RequestError(f"{path}: {first['msg']}", param=path)


def _misspells(unknown: ErrorDetails, missing: ErrorDetails) -> bool:
    """Whether an unknown field resembles a missing one beside it."""
    (*beside, name), (*place, meant) = unknown["loc"] or ("",), missing["loc"] or ("",)
    kinds = (unknown["type"], missing["type"])
    return kinds == ("extra_forbidden", "missing") and beside == place and bool(did_you_mean(str(name), [str(meant)]))


def _path(steps: Sequence[str | int]) -> str:
    """A place in a body as OpenAI writes it: `messages[1].content[0].type`."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _models_at(annotation: Any, place: Sequence[str | int]) -> Iterator[type[BaseModel]]:
    """The models of objects at a place, as pydantic's errors write it, in a value with that annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not place:
            yield annotation
        elif field := _fields(annotation).get(str(place[0])):
            yield from _models_at(field, place[1:])
        return
    origin, kinds, rest = get_origin(annotation), get_args(annotation), place
    if origin is Annotated:
        tags = [each.tag for each in kinds if isinstance(each, Tag)]
        if tags and tags != [*place[:1]]:
            return
        kinds, rest = kinds[:1], place[len(tags) :]
    elif origin in (list, tuple):
        rest = place[1:]
    for each in kinds:
        yield from _models_at(each, rest)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """A model's fields by the names that clients use, with what they may hold."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}
