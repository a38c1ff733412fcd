"""A module for each measured system. Each runs in a process of its own, in the system's environment.

`python -m bench.peers.systems.NAME JOB.json RESULT.json`; `child` defines the content of both files.
"""
