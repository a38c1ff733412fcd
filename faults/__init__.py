"""Faults on purpose. A plan in YAML says what goes wrong, where and how often. The same plan always fails the same way.

The rooms of this cluster meet at protocols (`transport.base`), and a fault is a wrapper around one of them: `seams.py`.
Without a plan nothing is wrapped, so a node that is not under test runs none of this code.
"""
