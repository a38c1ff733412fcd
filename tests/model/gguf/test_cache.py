"""The cache of GGUF files: a file is converted once, completely or not at all, and processes share mapped weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hack_kernels.block_weight import as_numbers

from hackkv.errors import CheckpointError, ConfigError
from hackkv.model import find_model, load_model, model_hash
from hackkv.model.gguf import cache, conversion
from hackkv.model.tiny import Tiny
from tests.model.gguf.writing import write_gguf


@pytest.fixture(name="path")
def write(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "some-model.gguf", Tiny(layers=1))


def told(path: Path) -> list[tuple[int, int]]:
    """The progress reports of one conversion."""
    calls = list[tuple[int, int]]()
    cache.converted(path, torch.bfloat16, lambda done, total: calls.append((done, total)))
    return calls


def test_a_file_is_converted_once_and_progress_ends_with_all_bytes(path: Path) -> None:
    calls = told(path)
    assert calls[-1][0] == calls[-1][1] > 0
    assert told(path) == []


def test_another_content_or_dtype_is_another_folder(path: Path, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", Tiny(layers=1, seed=1))
    found = [find_model(str(path)), find_model(str(path), "float32"), find_model(str(other))]
    assert len({folder.path for folder in found}) == 3
    assert len({model_hash(folder.path) for folder in found}) == 3
    assert [folder.name for folder in found] == ["some-model", "some-model", "other"]


def test_a_dtype_that_we_do_not_compute_in(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: 'int4'"):
        find_model(str(path), "int4")


def test_a_conversion_that_broke_off_leaves_nothing_and_is_done_again(
    path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.converted(path, torch.bfloat16, break_off)
    assert not [entry for entry in own_cache.iterdir() if entry.is_dir()]
    (own_cache / "left-by-a-killed-process.part").mkdir()
    load_model(find_model(str(path)).path)


def test_processes_that_ask_at_once_get_one_folder(path: Path, own_cache: Path) -> None:
    code = "import sys; from hackkv.model import find_model; print(find_model(sys.argv[1]).path)"
    command = [sys.executable, "-c", code, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert [entry.name for entry in own_cache.iterdir() if entry.is_dir()] == [Path(answers.pop().strip()).name]


def test_a_folder_that_cannot_be_written_is_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"some-model\.gguf: cannot be converted into .*file"):
        find_model(str(path))


def test_a_full_disk_is_said_before_it_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SPARE_BYTES", 1 << 62)
    with pytest.raises(CheckpointError, match=r"some-model\.gguf: \d+ bytes are needed in .*, \d+ are free"):
        find_model(str(path))


def mapped(file: Path) -> Iterator[range]:
    """Addresses of this process at which `file` is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            start, stop = line.split()[0].split("-")
            yield range(int(start, 16), int(stop, 16))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_matrices_are_used_where_the_file_is_mapped(dtype: str, path: Path) -> None:
    folder = find_model(str(path), dtype).path
    weights = load_model(folder, dtype).weights
    layer = weights.layers[0]
    places = list(mapped(folder / conversion.WEIGHTS))
    for tensor in (weights.embed, weights.lm_head, layer.qkv, layer.out, layer.gate_up, layer.down, layer.input_norm):
        assert any(as_numbers(tensor).data_ptr() in place for place in places)


def test_a_fused_file_serves_in_another_dtype_too(path: Path) -> None:
    folder = find_model(str(path), "bfloat16").path
    wide, narrow = (as_numbers(load_model(folder, dtype).weights.layers[0].qkv) for dtype in ("float32", "bfloat16"))
    assert wide.dtype is torch.float32
    assert torch.equal(wide.bfloat16(), narrow)
