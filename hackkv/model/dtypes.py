"""The types in which a model's weights rest and its products are computed."""

from __future__ import annotations

import torch

from hackkv.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
CPU = torch.device("cpu")


def check_dtype(dtype: str, device: torch.device = CPU) -> None:
    """Raise `ConfigError` for a dtype that we do not compute in on `device`."""
    if dtype not in DTYPES or (dtype == "float16" and device.type == "cpu"):
        raise ConfigError(f"model.dtype: {dtype!r} is not available on {device.type}; known: {', '.join(DTYPES)}")
