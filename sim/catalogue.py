"""Tables that a specification refers to by name: GPUs, instances with their prices, and model shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from pydantic import Field

from hackkv.config import Frozen, load
from hackkv.errors import ConfigError
from hackkv.spelling import did_you_mean
from hackkv.types import KvShape

SHIPPED: Final = Path(__file__).with_name("catalogue.yaml")
FP16_BYTES = 2


class Gpu(Frozen):
    """One accelerator. Rates are dense."""

    fp16_tflops: float = Field(gt=0)
    int8_tops: float = Field(default=0.0, ge=0)
    """0: the device multiplies no INT8 matrices."""
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    bus_gb_s: float = Field(gt=0)
    """Bytes that one GPU sends to its neighbours in an all-reduce, in GB/s."""
    host_gb_s: float = Field(default=12.0, gt=0)
    """Copies to host memory and back, in GB/s."""
    source: str = ""


class Instance(Frozen):
    """A machine that is bought or rented as a whole."""

    gpu: str
    gpus: int = Field(gt=0)
    network_gbit_s: float = Field(gt=0)
    flow_gbit_s: float = Field(default=0.0, ge=0)
    """The most that one flow gets; 0 is no limit."""
    host_gib: float = Field(gt=0)
    usd_per_hour: float = Field(ge=0)
    source: str = ""


class ModelShape(Frozen):
    """The shape of a dense transformer."""

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    ffn: int = Field(gt=0)
    vocab: int = Field(gt=0)
    parameters_b: float = Field(gt=0)
    """Billions."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes of one parameter at rest."""
    source: str = ""

    @property
    def kv_shape(self) -> KvShape:
        """The shape of its KV."""
        return KvShape(self.layers, self.kv_heads, self.head_dim)

    @property
    def parameters(self) -> float:
        """Count of parameters."""
        return self.parameters_b * 1e9

    @property
    def total_weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    @property
    def attention_flops(self) -> float:
        """FLOPs of Q Kᵀ and P V of one query row over one row of context, in all layers."""
        return 4.0 * self.heads * self.head_dim * self.layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in FP16."""
        return 2 * FP16_BYTES * self.layers * self.kv_heads * self.head_dim


class Catalogue(Frozen):
    """GPUs, instances and models by name."""

    gpus: dict[str, Gpu] = Field(default_factory=dict)
    instances: dict[str, Instance] = Field(default_factory=dict)
    models: dict[str, ModelShape] = Field(default_factory=dict)

    def with_more(self, other: Catalogue) -> Catalogue:
        """The union of both; rows of `other` replace rows of equal name."""
        return Catalogue(
            gpus={**self.gpus, **other.gpus},
            instances={**self.instances, **other.instances},
            models={**self.models, **other.models},
        )

    def gpu_of(self, instance: Instance) -> Gpu:
        """The GPU of an instance. Raises `ConfigError` if the catalogue has no GPU of that name."""
        return named(self.gpus, instance.gpu, "gpu")


RowT = TypeVar("RowT")


def named(table: Mapping[str, RowT], name: str, field: str) -> RowT:
    """The row of that name. Raises `ConfigError` naming the field, the name and the nearest known name."""
    if name not in table:
        raise ConfigError(f"{field}: {name!r} is unknown{did_you_mean(name, table)}; known: {', '.join(table)}")
    return table[name]


@cache
def shipped() -> Catalogue:
    """The catalogue that comes with hackkv."""
    return load(Catalogue, SHIPPED)
