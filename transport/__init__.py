"""Moves bytes between processes: control calls (`rpc`) and KV frames (the wires). Knows no mathematics."""
