"""The whole cluster in one process on a clock of its own: thousands of bad days in a minute, each of them repeatable.

Everything is real but time and the network: router, schedulers, engines, kernels and codecs, joined by the in-process
wire. `loop.py` is the clock, `cluster.py` the machines, `scenario.py` the bad day, `python -m chaos` runs it.
"""
