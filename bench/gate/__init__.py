"""The simulator compared with a live cluster of real processes: `python -m bench.gate`."""
