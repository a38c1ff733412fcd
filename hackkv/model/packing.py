"""In which form a model's matrices rest: the setting `model.weights`.

`int8` and `int4` pack every matrix. What the checkpoint has in codes of no more bits stays exactly as it is. Matrices
of the vocabulary have 8 bits with either. `auto` packs nothing, as `fp32` and `bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hack_kernels.block_weight import fits

from hackkv.errors import ConfigError

DENSE: Final = {"fp32": "float32", "bf16": "bfloat16"}
"""Settings that pack nothing -> the dtype that they are for."""
PACKED: Final = {"int8": 8, "int4": 4}
AUTO: Final = "auto"
CHOICES: Final = (AUTO, *DENSE, *PACKED)
OF_VOCABULARY: Final = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Packing:
    """Which matrices are packed."""

    bits: int | None
    """Codes have so many bits at most; None packs nothing."""

    @property
    def name(self) -> str:
        """A word for each packing; empty where nothing is packed."""
        return f"int{self.bits}" if self.bits else ""

    def bits_for(self, tensor: str, shape: tuple[int, ...], held: int | None) -> int | None:
        """Bits of the codes of `tensor`, which the checkpoint holds in `held` bits; None if it is not packed."""
        if self.bits is None or not fits(shape):
            return None
        most = 8 if tensor in OF_VOCABULARY else self.bits
        return most if held is None else min(held, most)


def computed_in(dtype: str, weights: str) -> str:
    """What peers compare besides the checkpoint, as `hackkv serve --dtype` has it: float32, or float32,int8."""
    return f"{dtype},{weights}" if weights in PACKED else dtype


NOTHING: Final = Packing(None)


def packing_of(weights: str, dtype: str) -> Packing:
    """What the setting means where products are computed in `dtype`. Raises `ConfigError`."""
    if weights not in CHOICES:
        raise ConfigError(f"model.weights: {weights!r} is not one of {', '.join(CHOICES)}")
    if DENSE.get(weights, dtype) != dtype:
        raise ConfigError(f"model.weights: {weights} needs model.dtype {DENSE[weights]}, which is {dtype}")
    return Packing(PACKED.get(weights))
