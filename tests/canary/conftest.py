"""A tiny checkpoint, a separate cache for every test, and codecs whose outputs are wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hack_kernels.base import Backend, Pool
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from torch import Tensor

from hackkv.batch import Batch, non_finite
from hackkv.canary import check_codec
from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, Preset
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.types import KvShape

CONTEXT = 256


class Spoiling(PagedCodec):
    """A codec whose attention is wrong in the way that the preset's name says."""

    def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return noise as large as V or NaN, or raise an error that names K."""
        out = super().attend(layer, pool, batch, q, k, v)
        if self.name == "noise":
            return 3 * torch.randn(out.shape, generator=torch.Generator().manual_seed(layer))
        if self.name == "nan":
            # Only in the last layer: a layer after it would report a non-finite K.
            return out * torch.nan if layer + 1 == len(self.formats) else out
        raise non_finite(layer, batch, k * torch.nan, v)


def make_spoiling(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    fmt = RowFormat(shape.head_dim, 32)
    kept = Kept(fmt, backend.kernels_for(fmt, RowReference))
    return Spoiling(name, (kept,) * shape.num_layers, backend, ())


SPOILING = ("noise", "nan", "beyond")


@pytest.fixture(autouse=True)
def spoiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The presets of `SPOILING`."""
    for name in SPOILING:
        monkeypatch.setitem(CODECS, name, Preset(make_spoiling))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hackkv" / "codec-loss"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose context is shorter than the canary's text."""
    return write_tiny(tmp_path_factory.mktemp("canary") / "tiny", Tiny(max_context=CONTEXT))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> ModelConfig:
    """`checkpoint` in FP32."""
    return ModelConfig(path=str(checkpoint), dtype="float32")


@pytest.fixture(scope="session")
def surveyed(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the measured loss of every codec on `model`, which a refusal lists."""
    cache = tmp_path_factory.mktemp("surveyed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with pytest.raises(ConfigError, match="presets that pass"):
            check_codec(model, CodecConfig(name="hack", max_kl=1e-9))
    return cache / "hackkv" / "codec-loss"


@pytest.fixture
def known(surveyed: Path, own_cache: Path) -> None:
    """Copy the measurements of `surveyed` to this test's cache."""
    shutil.copytree(surveyed, own_cache)
