"""Faults on purpose. A plan in YAML says what goes wrong, where and how often. The same plan always fails the same way.

The rooms of this cluster meet at protocols (`transport.base`). `seams.py` wraps implementations of these protocols with
faults. Without a plan nothing is wrapped, so a node that is not under test runs none of this code.
"""
