"""Measurements: tasks, accuracy and speed of hackkv."""
