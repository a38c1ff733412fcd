"""Codecs and backends are listed in tables. No other code names them, so a new one changes nothing else.
Public classes have unique names.

A name may appear in its own module, in the table, and as the value of a setting: a default, or the codecs that an
experiment compares.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hack_kernels import BACKENDS

from hackkv.codecs import CODECS

ROOT = Path(__file__).parents[2]
ROOMS = (
    "app", "router", "prefill_node", "decode_node", "node", "faults", "transport", "hackkv", "kernels/hack_kernels",
    "measure", "sim",
)  # fmt: skip

NAMES = frozenset((*CODECS, *BACKENDS)) - {"cpu"}
"""`cpu` is left out, since it is the name of a device too."""
OF_BACKENDS = re.compile(rf"hack_kernels\.({'|'.join(BACKENDS)})\b")

OWN = {
    "hackkv/codecs/": "codecs and their table",
    "kernels/hack_kernels/": "backends and their table",
    "hackkv/defaults.py": "settings: the default, and what others are compared with",
    "sim/paper/": "the paper's experiments: its methods, and the codecs that stand for them",
    "measure/accuracy/variants.py": "the table of what is measured",
    "measure/accuracy/findings.py": "which of its rows are compared",
}
GENERATED = {"transport/pb/": "code that the protocol compiler writes"}
OWN_BACKENDS = {
    "kernels/hack_kernels/": "backends and their table",
    "hackkv/codecs/": "a codec's definition lies beside the kernels",
    "measure/calibrate/": "a calibration quantizes as its codec's definition does",
}


def sources(ending: str, own: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(path, text) of every file in `ROOMS` that may not use the names."""
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob(f"*{ending}")):
            path = file.relative_to(ROOT).as_posix()
            if not path.startswith(tuple(own)):
                yield path, file.read_text(encoding="utf-8")


def literals(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the string literals of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_python_file_names_a_codec_or_a_backend() -> None:
    found = [
        f"{path}:{line}: {text}" for path, code in sources(".py", OWN) for line, text in literals(code) if text in NAMES
    ]
    assert found == []


def test_the_page_names_no_codec() -> None:
    quoted = re.compile(rf"""["'`]({"|".join(map(re.escape, sorted(NAMES)))})["'`]""")
    assert [f"{path}: {hit}" for path, code in sources(".js", OWN) for hit in quoted.findall(code)] == []


def test_no_python_file_imports_from_a_backend() -> None:
    assert [f"{path}: {hit}" for path, code in sources(".py", OWN_BACKENDS) for hit in OF_BACKENDS.findall(code)] == []


@pytest.mark.parametrize("path", sorted(OWN | OWN_BACKENDS | GENERATED))
def test_every_exception_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_no_two_public_classes_of_the_wheel_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path, code in sources(".py", GENERATED):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
