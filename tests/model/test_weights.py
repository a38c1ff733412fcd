"""Checkpoints on disk: every defect is an error that names file and tensor; the hash notices every change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hack_kernels.block_weight import as_numbers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hackkv.errors import CheckpointError, ConfigError
from hackkv.model import identity, load_model, model_hash, progress_bar
from hackkv.model.tiny import Tiny, write_tiny

Q = "model.layers.0.self_attn.q_proj.weight"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(Q), f"{Q}: missing tensor"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight: missing tensor"),
        (lambda t: t.update({Q: t[Q][:-1].clone()}), rf"model.safetensors: {Q}: shape \[127, 64\], .* \[128, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"model.safetensors: {Q}: dtype I8"),
        (lambda t: t.update({"model.layers.0.mlp.bias": t[Q].clone()}), r"model.layers.0.mlp.bias: unknown tensor"),
    ],
)
def test_a_bad_tensor_is_named(own_tiny: Path, change: Callable[[dict[str, Tensor]], object], named: str) -> None:
    rewrite(own_tiny, change)
    with pytest.raises(CheckpointError, match=named):
        load_model(own_tiny, "float32")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(own_tiny: Path, keep: int) -> None:
    path = own_tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or not a safetensors file"):
        load_model(own_tiny, "float32")


def test_missing_files_are_named(own_tiny: Path) -> None:
    (own_tiny / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: No such file"):
        model_hash(own_tiny)
    (own_tiny / "model.safetensors").unlink()
    for action in (load_model, model_hash):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
            action(own_tiny)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "weight_map: missing or empty"),
        (json.dumps({"weight_map": {Q: "../elsewhere.safetensors"}}), "is not a file name"),
        (json.dumps({"weight_map": {Q: "gone.safetensors"}}), r"gone\.safetensors: no such file"),
    ],
)
def test_a_bad_index_is_named(own_tiny: Path, index: str, named: str) -> None:
    (own_tiny / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=named):
        load_model(own_tiny)


def test_tensors_that_old_checkpoints_carry_are_ignored(own_tiny: Path) -> None:
    rewrite(own_tiny, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}))
    assert len(load_model(own_tiny).weights.layers) == 1


def test_weights_outlive_their_files(own_tiny: Path) -> None:
    model = load_model(own_tiny, "float32")
    before = as_numbers(model.weights.layers[0].down).clone()
    path = own_tiny / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(100)
    assert torch.equal(as_numbers(model.weights.layers[0].down), before)


def test_progress_counts_every_byte(make_tiny: Callable[[Tiny], Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_model(make_tiny(Tiny(shards=2)), "float32", on_bytes=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_bar_is_silent_without_a_terminal(own_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("loading") as on_bytes:
        load_model(own_tiny, on_bytes=on_bytes)
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "")


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_an_unknown_dtype_is_refused(own_tiny: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load_model(own_tiny, dtype)


def test_the_same_recipe_gives_the_same_hash(tmp_path: Path) -> None:
    assert model_hash(write_tiny(tmp_path / "a", Tiny())) == model_hash(write_tiny(tmp_path / "b", Tiny()))


@pytest.mark.parametrize("whole_bytes", [identity.WHOLE_BYTES, 1000])
def test_the_hash_changes_with_weights_config_and_tokenizer(
    tmp_path: Path, own_tiny: Path, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if files are only sampled. These are small enough for the samples to cover them."""
    monkeypatch.setattr(identity, "WHOLE_BYTES", whole_bytes)
    hashes = [model_hash(own_tiny)]
    for name, offset in [("model.safetensors", -1), ("model.safetensors", 70_000), ("config.json", 3)]:
        copy = tmp_path / f"{name}{offset}"
        shutil.copytree(own_tiny, copy)
        content = bytearray((copy / name).read_bytes())
        content[offset] ^= 1
        (copy / name).write_bytes(content)
        hashes.append(model_hash(copy))
    with (own_tiny / "tokenizer.json").open("a") as file:
        file.write("\n")
    hashes.append(model_hash(own_tiny))
    assert len(set(hashes)) == len(hashes)
