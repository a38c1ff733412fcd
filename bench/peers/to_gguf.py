"""`python to_gguf.py CHECKPOINT OUT.gguf`: converts a Llama checkpoint of BF16 weights to GGUF with the same weights.

It runs in the peer's environment and needs only numpy, safetensors and gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize
from safetensors import deserialize

BF16 = gguf.GGMLQuantizationType.BF16

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Weights = npt.NDArray[np.float32]


def main(checkpoint: Path, target: Path) -> None:
    """Convert `checkpoint` to the file `target`."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "llama")
    _write_head(writer, config)
    for name, tensor in deserialize((checkpoint / "model.safetensors").read_bytes()):  # type: ignore[no-untyped-call]
        data = _reordered(name, _widened(tensor), config)
        if data.ndim == 1:  # llama.cpp wants norms in FP32
            writer.add_tensor(f"{_name(name)}.weight", data)
        else:
            writer.add_tensor(f"{_name(name)}.weight", quantize(data, BF16), raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_head(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    # The vocabulary has placeholder names only: the benchmark sends token ids.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return OUTER[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}"


def _widened(tensor: dict[str, Any]) -> Weights:
    """A BF16 tensor as FP32: its bits followed by 16 zeros, since numpy has no BF16."""
    assert tensor["dtype"] == "BF16", tensor["dtype"]
    bits = np.frombuffer(tensor["data"], dtype=np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tensor["shape"])


def _reordered(name: str, data: Weights, config: dict[str, Any]) -> Weights:
    """Rows of Q and K in llama.cpp's order: it rotates neighbouring channels, Hugging Face rotates the two halves."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for projection, count in heads.items():
        if projection in name:
            data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
    return data


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
