"""Trains the small language model that ships with hackkv (see `small.yaml`)."""
