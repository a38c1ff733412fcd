"""Runs the whole cluster in one process on a virtual clock, under faults. Every run can be repeated.

Everything but time and the network is real: router, schedulers, engines, kernels and codecs, joined by the in-process
wire. `loop.py` is the clock, `cluster.py` has the machines, `scenario.py` runs a scenario (a "bad day": requests and
faults), and `python -m chaos` is the command.
"""
