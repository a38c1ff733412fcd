"""Research: how many bytes of KV cache SmolLM2 needs for how much accuracy, with fake quantization in float32."""
