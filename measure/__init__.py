"""What users measure through the command line: `hackkv eval` (accuracy), `hackkv calibrate`, `hackkv bench` (load)."""
