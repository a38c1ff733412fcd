"""Values that config.json may have. Each error names its field."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hackkv.errors import CheckpointError
from hackkv.model import read_spec
from hackkv.types import KvLayout


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: 'GPT2LMHeadModel' is not one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures: None"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, found '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 33}, "head_dim: 33 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id: expected token ids"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window: True"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_parameters: rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters: llama3 needs other values"),
        ({"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ({"rope_theta": 0}, "rope_theta: expected a number above 1"),
    ],
)
def test_a_bad_field_is_named(own_tiny: Path, changes: dict[str, Any], named: str) -> None:
    edit(own_tiny, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_spec(own_tiny)
    assert f"{own_tiny / 'config.json'}: {named}" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
def test_a_file_that_is_no_json_object_is_named(own_tiny: Path, content: str) -> None:
    (own_tiny / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: (cannot be read as JSON|expected a JSON object)"):
        read_spec(own_tiny)


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_spec(tmp_path)


def test_a_short_sliding_window_caps_the_context_and_says_so(own_tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(own_tiny, architectures=["MistralForCausalLM"], sliding_window=1024)
    with caplog.at_level(logging.WARNING):
        assert read_spec(own_tiny).max_context == 1024
    assert "serving 1024 tokens of context, the sliding window, not 4096" in caplog.text


def test_context_limits(own_tiny: Path) -> None:
    assert read_spec(own_tiny).max_context == 4096
    assert read_spec(own_tiny, 100).max_context == 100
    with pytest.raises(CheckpointError, match="allows 4096 tokens, max_context asks for 4097"):
        read_spec(own_tiny, 4097)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    edit(own_tiny, rope_scaling=yarn)
    assert read_spec(own_tiny).max_context == 16384


def test_generation_config(own_tiny: Path) -> None:
    (own_tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert read_spec(own_tiny).eos_ids == (7, 1)
    (own_tiny / "generation_config.json").unlink()
    assert read_spec(own_tiny).eos_ids == (1,)


def test_kv_layout(own_tiny: Path) -> None:
    assert read_spec(own_tiny).kv_layout(64) == KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, page_tokens=64)


def test_head_dim_defaults_to_the_family(own_tiny: Path) -> None:
    edit(own_tiny, head_dim=None)
    assert read_spec(own_tiny).head_dim == 32
    edit(own_tiny, architectures=["Qwen3ForCausalLM"])
    assert read_spec(own_tiny).head_dim == 128
