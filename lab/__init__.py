"""Developer room: rival kernels to measure against, and a reader of machine code. Not in the wheel."""
