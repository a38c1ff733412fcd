"""Measurements for developers: speed, endurance and rivals. Not in the wheel."""
