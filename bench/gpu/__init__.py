"""The GPU kernels, checked and timed on the machine at hand: `PYTHONPATH=kernels python -m bench.gpu`."""
