"""Errors cross processes as (code, message): every class must come back as itself."""

from __future__ import annotations

import pytest

from hackkv import errors
from hackkv.errors import HackkvError, by_code

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HackkvError)]


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(codes) > 10
    assert len(set(codes)) == len(codes)
    assert all(code.isidentifier() for code in codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_survives_the_wire(cls: type[HackkvError]) -> None:
    error = by_code(cls.code, "what was said")
    assert type(error) is cls
    assert str(error) == "what was said"


def test_an_unknown_code_becomes_the_base_class() -> None:
    error = by_code("from the future", "words")
    assert type(error) is HackkvError
    assert str(error) == "words"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_tree_in_the_docstring_names_every_class(cls: type[HackkvError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
