"""The same request to the same weights: hackkv through HTTP, router and wire, and llama.cpp in one process."""
