"""The rows of the table: codecs and settings to compare, exact KV first.

Every preset of `hackkv.codecs.CODECS` is a row under its own name. The other rows are ablations of the paper's form; a
name says how a row departs from the preset with which it starts. `hack` is Π 64, rounding to nearest, symmetric 8-bit Q
and P, and the open-page rule; `hack-paper` is Π 64, stochastic, asymmetric with stored sums, K quantized at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hackkv.codecs import BENEATH, CALIBRATED, CODECS, PROJECTED
from hackkv.codecs.artifact import KVQUANT, ROTATED, UNCALIBRATED, ZACK, read_artifact
from hackkv.codecs.rotated import LayerBits, written_bits
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError

Setting = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Variant:
    """One row: a codec with settings, the family with which it is drawn, and a description."""

    name: str
    codec: CodecConfig
    family: str
    says: str


def _row(name: str, preset: str, family: str, says: str, **settings: Setting) -> Variant:
    return Variant(name, CodecConfig(name=preset, settings=dict(settings)), family, says)


EXACT: Final = _row("fp16", "fp16", "exact", "exact: K and V in FP16, attention in FP32")
_OPEN, _STOCHASTIC, _PAPER, _ABLATION = "open-page rule, nearest", "open-page rule, stochastic", "paper", "ablation"
_EVICTING: Final = "evicting"
_PROJECTED: Final = "projected"
_ROT: Final = "rot"

_DESCRIBED: Final = (
    EXACT,
    _row("hack-32", "hack", _OPEN, "`hack` at Π 32", page_tokens=32),
    _row("hack", "hack", _OPEN, "Π 64, 2-bit, nearest, symmetric, open-page rule"),
    _row("hack-128", "hack", _OPEN, "`hack` at Π 128", page_tokens=128),
    _row("hack-32-stochastic", "hack", _STOCHASTIC, "Π 32, stochastic", page_tokens=32, rounding="stochastic"),
    _row("hack-stochastic", "hack", _STOCHASTIC, "`hack`, but stochastic rounding", rounding="stochastic"),
    _row("hack-128-stochastic", "hack", _STOCHASTIC, "Π 128, stochastic", page_tokens=128, rounding="stochastic"),
    _row("hack-k4v2", "hack-k4v2", "4-bit K", "`hack`, but K in 4 bits"),
    _row(
        "hack-asymmetric", "hack", _ABLATION, "`hack`, but Q and P as in the paper, with sums", arithmetic="asymmetric"
    ),
    _row(
        "hack-asymmetric-no-se",
        "hack",
        _ABLATION,
        "the row above with SE off: sums recomputed at every use",
        arithmetic="asymmetric",
        stored_sums=False,
    ),
    _row("hack-k-codes", "hack", _ABLATION, "`hack`, but K of the open page as codes", open_page="k_codes"),
    _row(
        "hack-no-rqe",
        "hack",
        _ABLATION,
        "`hack` with RQE off: K and V of the open page as codes",
        open_page="requantize",
    ),
    _row("hack-paper-32", "hack-paper", _PAPER, "the paper at Π 32", page_tokens=32),
    _row("hack-paper", "hack-paper", _PAPER, "the paper: stochastic, asymmetric, K at once, own page's V in FP16"),
    _row("hack-paper-128", "hack-paper", _PAPER, "the paper at Π 128", page_tokens=128),
    _row("snapkv-half", "snapkv", _EVICTING, "`snapkv`, but half of the rows stay", budget="50%"),
    _row("snapkv-rot-k4v4", "snapkv", _EVICTING, "`snapkv` in pages of `rot-k4v4`", of="rot-k4v4"),
    _row("mpcache-static", "mpcache", _EVICTING, "`mpcache`, but decode reads all pages", select="100%"),
    _row("mpcache-rot-k4v4", "mpcache", _EVICTING, "`mpcache` in pages of `rot-k4v4`", of="rot-k4v4"),
    *(
        _row(f"{name}-fp8", name, _ROT, f"`{name}`, but scales in FP8", scales="fp8")
        for name in ("rot-k4v4", "rot-k3v3", "rot-k3v2", "rot-k2v2")
    ),
    _row("kvquant-3", "kvquant-4", KVQUANT, "`kvquant-4`, but 3 bits", k_bits=3, v_bits=3),
    _row("cachegen-level-3", "cachegen", "cachegen", "`cachegen`, but 32 bins in all layers", level="3"),
    _row("kvcomp-channel", "kvcomp", "kvcomp", "`kvcomp`, but K by channel", k_unit="channel", k_scale=0.25),
    _row("hack-paper-no-rqe", "hack-paper", _PAPER, "the paper with RQE off (its Table 7)", open_page="requantize"),
)
"""Rows with a description of their own. The other presets follow; their settings describe them."""


PLAIN: Final = "rot, plain"
"""The family of rows without the calibration that ships for a model."""


def _says(name: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in CODECS[name].settings.items()) or "no settings"


VARIANTS: Final = (
    *_DESCRIBED,
    *(
        _row(name, name, name.partition("-")[0], _says(name))
        for name in CODECS
        if name not in {row.name for row in _DESCRIBED} and name not in PROJECTED
    ),
    *(
        _row(f"{name}-plain", name, PLAIN, f"{_says(name)}; never calibrated", calibration=UNCALIBRATED)
        for name in CALIBRATED
    ),
)


def calibrated(file: Path) -> tuple[Variant, ...]:
    """The rows of presets with a file that `hackkv calibrate` wrote for them.

    Raises `ConfigError` for a file that cannot be read.
    """
    try:
        artifact = read_artifact(file)
        mixed = written_bits(artifact)
    except ValueError as error:
        raise ConfigError(f"--calibration: {error}") from error
    rows_of = _ROWS_OF.get(artifact.family)
    if rows_of is None:
        raise ConfigError(f"--calibration: {file} is for codecs of the unknown family {artifact.family!r}")
    return rows_of(file, mixed)


def _rotated(file: Path, mixed: Sequence[LayerBits]) -> tuple[Variant, ...]:
    """If the file has bits by layer, only the presets of those bits get a row."""
    if mixed:
        return tuple(row for each in mixed for row in _mixed(each, file))
    return tuple(
        _row(f"{name}-calibrated", name, "rot, calibrated", f"{_says(name)}; calibrated", calibration=str(file))
        for name in CALIBRATED
    )


def _mixed(mixed: LayerBits, file: Path) -> tuple[Variant, ...]:
    bits = {"k_bits": mixed.k_bits, "v_bits": mixed.v_bits}
    says = "{}, more bits in some layers; calibrated"
    return tuple(
        _row(f"{name}-mixed", name, "rot, calibrated", says.format(_says(name)), calibration=str(file))
        for name in CALIBRATED
        if bits.items() <= CODECS[name].settings.items()
    )


def _kvquant(file: Path, _: Sequence[LayerBits]) -> tuple[Variant, ...]:
    return tuple(
        _row(
            f"{row.name}-calibrated",
            row.codec.name,
            KVQUANT,
            f"{row.says}; calibrated",
            **{**row.codec.settings, "calibration": str(file)},
        )
        for row in VARIANTS
        if row.family == KVQUANT
    )


SHARES: Final = (
    *(("fp16", share) for share in ("90%", "75%", "62.5%", "50%")),
    *(("rot-k4v4", share) for share in ("21%", "17.5%", "14.5%")),
)
"""(codec of the pages that are projected, share of FP16's bytes to stay within)"""


def _projected(file: Path, _: Sequence[LayerBits]) -> tuple[Variant, ...]:
    return tuple(
        _row(
            f"{ZACK}-{of}-{share.removesuffix('%')}",
            ZACK,
            _PROJECTED,
            f"projected, in pages of {of}, at most {share} of FP16",
            calibration=str(file),
            share=share,
            **{BENEATH: of},
        )
        for of, share in SHARES
    )


_ROWS_OF: Final[Mapping[str, Callable[[Path, Sequence[LayerBits]], tuple[Variant, ...]]]] = {
    ROTATED: _rotated,
    KVQUANT: _kvquant,
    ZACK: _projected,
}
"""Family of a calibration file -> (the file, its bits by layer) -> the rows that it adds."""


def choose(names: Sequence[str], calibration: Path | None = None, *, ablations: bool = True) -> tuple[Variant, ...]:
    """The named rows in the table's order, exact KV always among them. Without names, all rows but those that leave a
    calibration out; without `ablations`, only the presets. A calibration file adds calibrated rows.

    Raises `ConfigError` naming an unknown row.
    """
    rows = VARIANTS if calibration is None else (*VARIANTS, *calibrated(calibration))
    known = {variant.name for variant in rows}
    for name in names:
        if name not in known:
            raise ConfigError(f"--variants: {name!r} is unknown; known: {', '.join(v.name for v in rows)}")
    if names:
        return tuple(v for v in rows if v is EXACT or v.name in names)
    families = {"rot, calibrated", _PROJECTED} | ({v.family for v in rows} - {PLAIN} if ablations else set())
    return tuple(v for v in rows if v.name in CODECS or v.family in families)
