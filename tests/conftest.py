"""What every test runs under."""

from __future__ import annotations

import os

import torch

# Kernels for GPUs run on the processor here, one operation after another; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests share few cores with the processes that they start; a second compute thread would mostly wait for the first.
torch.set_num_threads(1)

# Triton decides when it is imported whether kernels are compiled or interpreted on the CPU; without a GPU, the latter.
# Tests that compile for a GPU do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
