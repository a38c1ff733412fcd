"""The form in which a model's matrices rest: the setting `model.weights`.

`int8` and `int4` pack every matrix. A matrix that the checkpoint has in codes of no more bits stays as it is. Matrices
of the vocabulary have 8 bits with either. `fp32` and `bf16` pack nothing. `auto` takes what the checkpoint has: codes
stay codes and numbers stay numbers. In FP32, and on a GPU, it packs nothing: rows that meet codes are rounded to 15
bits, and a GPU has no kernel for codes.
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
CPU: Final = "cpu"
CHOICES: Final = (AUTO, *DENSE, *PACKED)
OF_VOCABULARY: Final = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Packing:
    """The choice of matrices to pack."""

    bits: int | None
    """The most bits of a code; None packs nothing."""
    held_only: bool = False
    """Whether only matrices that the checkpoint has in codes are packed."""

    @property
    def name(self) -> str:
        """A word for each packing; empty where nothing is packed."""
        if self.held_only:
            return "held"
        return f"int{self.bits}" if self.bits else ""

    @property
    def packs(self) -> bool:
        """Whether numbers become codes."""
        return self.bits is not None and not self.held_only

    def bits_for(self, tensor: str, shape: tuple[int, ...], held: int | None) -> int | None:
        """Bits of the codes of `tensor`, which the checkpoint holds in `held` bits; None if it is not packed."""
        if self.bits is None or not fits(shape) or (self.held_only and held is None):
            return None
        most = 8 if tensor in OF_VOCABULARY else self.bits
        return most if held is None else min(held, most)


def computed_in(dtype: str, weights: str) -> str:
    """The dtype that peers compare, as `hackkv serve --dtype` has it: float32, or float32,int8."""
    return f"{dtype},{weights}" if weights in PACKED else dtype


NOTHING: Final = Packing(None)
HELD: Final = Packing(8, held_only=True)


def packing_of(weights: str, dtype: str, device: str = CPU) -> Packing:
    """The packing that the setting means for products in `dtype` on such a device. Raises `ConfigError`."""
    if weights not in CHOICES:
        raise ConfigError(f"model.weights: {weights!r} is not one of {', '.join(CHOICES)}")
    if DENSE.get(weights, dtype) != dtype:
        raise ConfigError(f"model.weights: {weights} needs model.dtype {DENSE[weights]}, which is {dtype}")
    if weights == AUTO:
        return HELD if (dtype, device) == ("bfloat16", CPU) else NOTHING
    return Packing(PACKED.get(weights))
