"""The GPU kernels, checked and timed on this machine: `PYTHONPATH=kernels python -m bench.gpu`."""
