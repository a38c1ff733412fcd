"""Rivals of the GPU kernels, and reports on the machine code of all."""
