"""Faults on purpose: a plan in YAML says what goes wrong, where and how often; the same plan goes wrong the same way.

The rooms of this cluster meet at protocols (`transport.base`), and a fault is a wrapper around one of them: `seams.py`.
Without a plan nothing is wrapped, so a node that is not under test has no trace of this in any path.
"""
