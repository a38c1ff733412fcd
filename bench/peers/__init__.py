"""One request to the same weights in two systems: hackkv through HTTP, router and wire; llama.cpp in one process."""
