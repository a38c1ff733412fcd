"""What users measure through the command line: `hackkv eval` (accuracy) and `hackkv bench` (load)."""
