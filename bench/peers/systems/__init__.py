"""A module for each system that is measured. Each runs as a process of its own, in the system's environment.

`python -m bench.peers.systems.NAME JOB.json RESULT.json`; `child` says what both hold.
"""
