"""Counts of `tools.limits`."""

from __future__ import annotations

import pytest

from tools.limits import MOST_ATTRIBUTES, MOST_LINES, MOST_METHODS, MOST_PARAMETERS, census


def broken(source: str) -> list[str]:
    counted = census({"one.py": source})
    return [f"{name}: {shape.name}" for name, shapes in counted.broken().items() for shape in shapes]


def names(count: int) -> str:
    return ", ".join(f"a{i}" for i in range(count))


def fields(count: int, head: str) -> str:
    return "\n".join([head, *(f"    a{i}: int" for i in range(count))])


def assigned(count: int, value: str = "0") -> str:
    return "\n".join(["class Two:", "    def __init__(self):", *(f"        self.a{i} = {value}" for i in range(count))])


def together(count: int) -> str:
    return f"class Two:\n    def __init__(self):\n        {', '.join(f'self.a{i}' for i in range(count))} = x"


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (f"def one({names(MOST_PARAMETERS)}): ...", f"def one({names(MOST_PARAMETERS)}, *, last): ..."),
        (assigned(MOST_ATTRIBUTES), assigned(MOST_ATTRIBUTES + 1)),
        (together(MOST_ATTRIBUTES), together(MOST_ATTRIBUTES + 1)),
        (fields(MOST_ATTRIBUTES, "@dataclass\nclass Two:"), fields(MOST_ATTRIBUTES + 1, "@dataclass\nclass Two:")),
        (
            "class Three:\n" + "".join(f"    def a{i}(self): ...\n" for i in range(MOST_METHODS)),
            "class Three:\n" + "".join(f"    def a{i}(self): ...\n" for i in range(1 + MOST_METHODS)),
        ),
        ("\n" * MOST_LINES, "\n" * (MOST_LINES + 1)),
    ],
)
def test_a_limit_is_the_last_that_passes(within: str, beyond: str) -> None:
    assert broken(within) == []
    assert len(broken(beyond)) == 1


@pytest.mark.parametrize(
    "source",
    [
        f"class Two:\n    def method(self, {names(MOST_PARAMETERS)}): ...",
        f"@triton.jit\ndef kernel({names(30)}): ...",
        f"@triton.jit(noinline=True)\ndef kernel({names(30)}): ...",
        fields(30, "@dataclass(frozen=True, slots=True)\nclass Two:"),
        fields(30, "class Two(Protocol):"),
        fields(30, "class One(BaseModel): ...\nclass Two(One):"),
        assigned(30, "Counter('a', 'b')"),
        assigned(30, "histogram('a', 'b')"),
        "class Three:\n" + "    @a.setter\n    def a(self): ...\n" * 30,
    ],
)
def test_what_has_no_limit(source: str) -> None:
    assert broken(source) == []


def test_parameters_are_judged_as_a_whole_too() -> None:
    source = "\n".join(f"def one({names(count)}): ..." for count in range(11))
    counted = census({"one.py": source, "tests/one.py": "def one(): ...\n" * 99})
    assert counted.usual_parameters == 9


def test_a_record_of_the_same_name_excuses_nobody() -> None:
    assert broken("@dataclass(frozen=True)\nclass Two: ...\n" + assigned(30)) == [
        f"classes of more than {MOST_ATTRIBUTES} attributes: Two"
    ]
