"""The GPU kernels' rivals, and what their machine code says."""
