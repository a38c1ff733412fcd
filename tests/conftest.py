"""What every test runs under."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from hackkv.codecs import CODECS, Preset
from tests.toys import make_layered

# Tests share few cores with the processes that they start; a second compute thread would mostly wait for the first.
torch.set_num_threads(1)

# Triton decides when it is imported whether kernels are compiled or interpreted on the CPU; without a GPU, the latter.
# Tests that compile for a GPU do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Tests that loop over CODECS hold it for formats that differ by layer, and for a wire form of variable size: one row
# each, and no test knows of them.
CODECS["toy-layers"] = Preset(make_layered)
if find_spec("zstandard"):
    CODECS["hack-zstd"] = Preset(CODECS["hack"].make, {"wire_form": "zstd"})
