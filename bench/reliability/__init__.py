"""Behaviour of a cluster of real processes when its nodes are killed or restarted under load."""
