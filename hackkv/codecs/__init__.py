"""The table of codecs: every form in which a KV cache can rest and travel, by name.

To add one, write a module beside this one and enter it in `CODECS`; the contract tests loop over the table, and nothing
else in the project knows a codec by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from hack_kernels.base import Arithmetic, HackFormat, HackKernels, OpenPage, Rounding
from pydantic import Field, ValidationError

from hackkv.codec import KvCodec
from hackkv.codecs.fp16 import Fp16Codec
from hackkv.codecs.hack import HackCodec
from hackkv.config import CodecConfig, Frozen
from hackkv.errors import ConfigError


class HackSettings(Frozen):
    """Settings of the `hack` presets; see `HackFormat`."""

    page_tokens: int = 64
    k_bits: int = 2
    v_bits: int = 2
    rounding: Rounding = Rounding.NEAREST
    arithmetic: Arithmetic = Arithmetic.SYMMETRIC
    stored_sums: bool = True
    open_page: OpenPage = OpenPage.EXACT
    send_sums: bool = False
    seed: int = Field(default=0, ge=0, lt=2**64)


class Fp16Settings(Frozen):
    """Settings of `fp16`."""

    page_tokens: int = Field(default=64, multiple_of=8, gt=0, le=256)


Factory = Callable[[str, int, HackKernels, dict[str, Any]], KvCodec]
"""(preset name, head_dim, kernels, settings) -> codec. Raises `ValueError` naming a bad setting."""


def _hack(**preset: object) -> Factory:
    def make(name: str, head_dim: int, kernels: HackKernels, settings: dict[str, Any]) -> KvCodec:
        chosen = HackSettings.model_validate({**preset, **settings})
        fields = chosen.model_dump()
        send_sums = fields.pop("send_sums")
        fmt = HackFormat(head_dim=head_dim, **fields)
        if send_sums and not fmt.sums:
            raise ValueError("send_sums is set, but these settings keep no sums")
        return HackCodec(name, fmt, kernels, send_sums=send_sums)

    return make


def _fp16(name: str, head_dim: int, kernels: HackKernels, settings: dict[str, Any]) -> KvCodec:
    return Fp16Codec(name, head_dim, Fp16Settings.model_validate(settings).page_tokens, kernels)


CODECS: Final[Mapping[str, Factory]] = {
    "fp16": _fp16,
    "hack": _hack(),
    "hack-k4v2": _hack(k_bits=4),
    "hack-paper": _hack(
        rounding=Rounding.STOCHASTIC, arithmetic=Arithmetic.ASYMMETRIC, open_page=OpenPage.K_CODES, send_sums=False
    ),
}


def make_codec(config: CodecConfig, head_dim: int, kernels: HackKernels) -> KvCodec:
    """Build the configured codec. Raises `ConfigError` naming the preset or the setting at fault."""
    if config.name not in CODECS:
        raise ConfigError(f"codec.name: {config.name!r} is unknown; known: {', '.join(CODECS)}")
    try:
        return CODECS[config.name](config.name, head_dim, kernels, dict(config.settings))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"codec.settings.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"codec.settings: {error}") from error
