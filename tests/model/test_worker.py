"""What a node finds wrong with its kernels before it loads a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable

from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.worker import check_worker


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model\.backend: .*'abacus' is unknown; known: .*cpu"):
        check_worker(ModelConfig(backend="abacus"), CodecConfig())


def test_kernels_older_than_their_sources_are_refused_with_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        cpu.extension()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    shutil.copytree(cpu.SOURCES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "added.h").touch()
    monkeypatch.setattr(cpu, "SOURCES", tmp_path)
    cpu.extension.cache_clear()
    for backend in ("auto", "cpu"):
        with pytest.raises(ConfigError, match=r"model\.backend: .*pip install -e \."):
            check_worker(ModelConfig(backend=backend), CodecConfig())
