"""Kernels for GPUs in Triton; `layout.py` states how pages rest, every other file is one kernel or its gate."""
