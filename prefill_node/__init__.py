"""Runs prompts on HACK-quantized attention and hands their compressed KV to decode nodes."""
