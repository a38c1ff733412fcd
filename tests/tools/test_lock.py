"""constraints.txt pins all packages that pyproject.toml needs, at versions that it admits."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import OF_TORCH

ROOT = Path(__file__).resolve().parents[2]
PINS = {
    canonicalize_name(pin.name): pin.specifier
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for pin in [Requirement(line)]
}


def required() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["dev"])]


def test_each_dependency_is_pinned_in_a_version_that_is_admitted() -> None:
    for each in required():
        if each.name == "hackkv" or OF_TORCH.fullmatch(each.name):
            continue
        (pin,) = PINS[canonicalize_name(each.name)]
        assert pin.operator == "==", f"{each.name} is not pinned"
        assert each.specifier.contains(pin.version), f"{each} does not admit {pin.version}: run `make lock`"


def test_what_comes_with_torch_is_not_pinned() -> None:
    assert not [name for name in PINS if OF_TORCH.fullmatch(name)]
