"""Old GPUs are refused with the reason."""

from __future__ import annotations

import torch
from hack_kernels.triton.support import missing, missing_in


def test_gpus_without_int8_products_are_refused_by_name() -> None:
    refusal = missing_in("Tesla T4", (7, 5))
    assert refusal is not None
    assert "Tesla T4 has compute capability 7.5; the kernels need 8.0" in refusal
    assert missing_in("NVIDIA A100", (8, 0)) is None
    assert missing_in("NVIDIA B200", (10, 0)) is None


def test_other_devices_are_refused() -> None:
    assert missing(torch.device("cpu")) == "device cpu is no CUDA device"
