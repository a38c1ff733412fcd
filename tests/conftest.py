"""What every test runs under."""

from __future__ import annotations

import torch

# Tests share few cores with the processes that they start; a second compute thread would mostly wait for the first.
torch.set_num_threads(1)
