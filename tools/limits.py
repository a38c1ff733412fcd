"""`python -m tools.limits [PATH ...]`: lists code that is too large to be read at once; exit code 1 if there is any.

Limits of hand-written Python: a function has at most 10 parameters and nine of ten functions at most 6, a class of
behaviour at most 12 attributes, any class at most 20 methods, a file at most 350 lines.

What is counted, and what is not:

- A parameter is anything that a caller may pass; `self` and `cls` do not count. Device code (`@triton.jit`) has no
  limit.
- An attribute is a name that a class assigns on `self` or declares as a field.
- A *record* carries values and has no limit of attributes: a frozen dataclass, a pydantic model, a protocol, a named
  tuple, a typed dictionary, an enumeration, an exception, and every class that descends from one. The largest are
  listed.
- A series of a metrics registry (`self.x = Counter(...)`, `histogram(...)`) is a row of a table, not an attribute.
- A method is a `def` in the class body; a property and its setter are one.
- Generated code (`transport/pb`) is not counted.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

MOST_PARAMETERS, USUAL_PARAMETERS = 10, 6
MOST_ATTRIBUTES, MOST_METHODS, MOST_LINES = 12, 20, 350

GENERATED, TESTS = "transport/pb/", "tests/"
RECORDS = frozenset({"BaseModel", "Protocol", "NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum", "Exception"})
"""A class is a record if it descends from one of these."""
SERIES = frozenset({"counter", "gauge", "histogram"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Shape:
    """One count of one function, class or file."""

    where: str
    name: str
    count: int

    def __str__(self) -> str:
        return f"{self.count:5}  {self.where}  {self.name}"


@dataclass(slots=True)
class Census:
    """All counts."""

    parameters: list[Shape] = field(default_factory=list)
    attributes: list[Shape] = field(default_factory=list)
    fields: list[Shape] = field(default_factory=list)
    """Attributes of records."""
    methods: list[Shape] = field(default_factory=list)
    lines: list[Shape] = field(default_factory=list)

    def add(self, path: str, node: ast.AST, records: Set[ast.ClassDef]) -> None:
        """Count one function or class. Other nodes are ignored."""
        if isinstance(node, Function) and not _is_device_code(node):
            self.parameters.append(Shape(f"{path}:{node.lineno}", node.name, len(_parameters(node))))
        if isinstance(node, ast.ClassDef):
            where = f"{path}:{node.lineno}"
            attributes = self.fields if node in records else self.attributes
            attributes.append(Shape(where, node.name, len(_attributes(node))))
            self.methods.append(Shape(where, node.name, len({method.name for method in _methods(node)})))

    @property
    def usual_parameters(self) -> float:
        """The number of parameters that nine of ten functions do not exceed. Tests have few, so they are left out."""
        counts = [shape.count for shape in self.parameters if not shape.where.startswith(TESTS)]
        return statistics.quantiles(counts, n=10, method="inclusive")[-1] if len(counts) > 1 else 0.0

    def broken(self) -> dict[str, list[Shape]]:
        """Name of a limit -> the counts that exceed it, largest first."""
        limits = {
            f"functions of more than {MOST_PARAMETERS} parameters": _above(MOST_PARAMETERS, self.parameters),
            f"classes of more than {MOST_ATTRIBUTES} attributes": _above(MOST_ATTRIBUTES, self.attributes),
            f"classes of more than {MOST_METHODS} methods": _above(MOST_METHODS, self.methods),
            f"files of more than {MOST_LINES} lines": _above(MOST_LINES, self.lines),
        }
        return {name: shapes for name, shapes in limits.items() if shapes}


def _above(limit: int, shapes: Iterable[Shape]) -> list[Shape]:
    return sorted((shape for shape in shapes if shape.count > limit), key=lambda shape: -shape.count)


def _parameters(function: Function) -> list[ast.arg]:
    of = function.args
    every = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]
    return [one for index, one in enumerate(every) if index or one.arg not in ("self", "cls")]


def _is_device_code(function: Function) -> bool:
    return any("jit" in _names(decorator) for decorator in function.decorator_list)


def _records(classes: Sequence[ast.ClassDef]) -> Set[ast.ClassDef]:
    """The classes that are records by themselves, and all that descend from one."""
    found = {node for node in classes if any(map(_is_frozen_dataclass, node.decorator_list))}
    while True:
        names = RECORDS | {node.name for node in found}
        heirs = {node for node in classes if any(_names(base) & names for base in node.bases)}
        if heirs <= found:
            return found
        found |= heirs


def _is_frozen_dataclass(decorator: ast.expr) -> bool:
    return "dataclass" in _names(decorator) and "frozen=True" in ast.unparse(decorator)


def _names(node: ast.AST) -> set[str]:
    """Every name in an expression: `triton.jit` is {triton, jit}."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def _methods(node: ast.ClassDef) -> list[Function]:
    return [statement for statement in node.body if isinstance(statement, Function)]


def _attributes(node: ast.ClassDef) -> set[str]:
    declared = {
        one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return declared.union(*map(_assigned_on_self, _methods(node)))


def _assigned_on_self(method: Function) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign) and not _is_series(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (one for target in targets for one in ast.walk(target)):
                if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
                    yield name.attr


def _is_series(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id.lower() in SERIES


def census(sources: Mapping[str, str]) -> Census:
    """Count files, given as path -> text."""
    nodes = [(path, node) for path, source in sources.items() for node in ast.walk(ast.parse(source))]
    records = _records([node for _, node in nodes if isinstance(node, ast.ClassDef)])
    counted = Census(lines=[Shape(path, "", source.count("\n")) for path, source in sources.items()])
    for path, node in nodes:
        counted.add(path, node, records)
    return counted


def tracked(paths: Sequence[str]) -> dict[str, str]:
    """Every tracked Python file under `paths` that a person wrote."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], capture_output=True, text=True, check=True).stdout
    found = [path for path in listed.splitlines() if path.endswith(".py") and not path.startswith(GENERATED)]
    return {path: Path(path).read_text(encoding="utf-8") for path in found if Path(path).exists()}


def main(paths: Sequence[str]) -> int:
    """Print a summary and all broken limits; return the exit code."""
    counted = census(tracked(paths))
    usual, most = counted.usual_parameters, max((shape.count for shape in counted.parameters), default=0)
    print(f"{len(counted.parameters)} functions: parameters p90 {usual:g} (limit {USUAL_PARAMETERS}), most {most}")
    print(f"{len(counted.attributes)} classes of behaviour, {len(counted.fields)} records; the largest records:")
    print(*sorted(counted.fields, key=lambda shape: -shape.count)[:5], sep="\n")
    broken = counted.broken()
    for name, shapes in broken.items():
        print(f"{len(shapes)} {name}:", *shapes, sep="\n")
    if not broken and usual <= USUAL_PARAMETERS:
        print("within all limits")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
