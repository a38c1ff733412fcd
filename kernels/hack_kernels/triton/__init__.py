"""Kernels for GPUs in Triton. `layout.py` and `*_layout.py` state how pages rest."""
