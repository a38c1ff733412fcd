"""The choice of the instruction set and of the number of threads, and an extension that is out of date."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hack_kernels import cpu, load
from hack_kernels.base import BackendUnavailable
from hack_kernels.cpu.extension import SOURCES, check_built_from, compiled
from hack_kernels.cpu.rows import native_row_format
from hack_kernels.row_format import RowFormat


def test_an_instruction_set_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match=r"'sve9'; it runs .*portable"):
        cpu.CpuBackend("sve9")
    monkeypatch.setenv(cpu.ISA_VARIABLE, "sve9")
    with pytest.raises(BackendUnavailable, match="sve9"):
        load("cpu")
    monkeypatch.setenv(cpu.ISA_VARIABLE, "portable")
    assert load("cpu").isa == "portable"


def test_an_extension_older_than_its_sources_is_refused(tmp_path: Path) -> None:
    digest = compiled().SOURCES
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    check_built_from(tmp_path, digest)
    with (tmp_path / "simd" / "portable.h").open("a") as header:
        header.write("// changed\n")
    with pytest.raises(ImportError, match=r"pip install -e \."):
        check_built_from(tmp_path, digest)
    check_built_from(tmp_path / "not a checkout", digest)


def test_what_a_kind_of_page_has_no_operation_for_is_refused() -> None:
    native, fmt = compiled().kernels("portable", 1), native_row_format(RowFormat(64, 32))
    ids, rows = torch.tensor([0]), torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="sealed by copying"):
        native.seal(fmt, 0, {"k": rows, "v": rows}, ids, ids, rows, rows)
    with pytest.raises(ValueError, match="plane v is missing"):
        native.seal(fmt, 0, {"k": rows}, ids, ids, rows, rows)


def test_a_width_of_codes_without_kernels_is_refused() -> None:
    settings = dict.fromkeys(("stochastic", "asymmetric", "stored_sums", "own_k_codes", "own_v_codes"), False)
    with pytest.raises(ValueError, match="width"):
        compiled().hack_format(head_dim=64, page_tokens=32, k_bits=3, v_bits=2, k_partition=32, seed=0, **settings)


def test_threads_must_be_positive(backend: cpu.CpuBackend) -> None:
    with pytest.raises(ValueError, match="threads"):
        backend.threads = 0
