"""Measurements for users of the command line: `hackkv eval` (accuracy), `hackkv calibrate`, `hackkv bench` (load)."""
