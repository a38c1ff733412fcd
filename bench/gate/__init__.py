"""The simulator held against a live cluster of real processes: `python -m bench.gate`."""
