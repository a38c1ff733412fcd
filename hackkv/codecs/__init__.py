"""The table of codecs: a preset name chooses one, settings refine it.

To add one, write a module beside this one and enter it in `CODECS`; the contract tests loop over the table, and nothing
else in the project knows a codec by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hack_kernels.base import Backend
from hack_kernels.float_format import Element, Scaling
from hack_kernels.hack_format import Arithmetic, OpenPage, Rounding
from pydantic import ValidationError

from hackkv.codec import KvCodec
from hackkv.codecs.cachegen import make_cachegen
from hackkv.codecs.evicting import Evicting
from hackkv.codecs.floats import make_floats
from hackkv.codecs.fp16 import make_fp16
from hackkv.codecs.hack import make_hack
from hackkv.codecs.kivi import make_kivi
from hackkv.codecs.kvcomp import make_kvcomp
from hackkv.codecs.kvquant import make_kvquant
from hackkv.codecs.paged import PagedCodec
from hackkv.codecs.retention import Retention
from hackkv.codecs.rotated import make_rotated
from hackkv.codecs.selecting import Selecting, SelectionSettings, with_bounds
from hackkv.codecs.zack import ZackSettings, make_projecting
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.types import KvShape
from hackkv.wire_choice import AUTO, CODER
from hackkv.wire_form import RAW, WireForm, wire_form

Factory = Callable[[str, KvShape, Backend, dict[str, Any]], KvCodec]
"""(preset name, shape of the model's KV, backend, settings) -> codec. Raises `ValueError` naming a bad setting."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of the table: a family of codecs, and the settings in which this one differs from the family's."""

    make: Factory
    settings: Mapping[str, Any] = field(default_factory=dict)


BENEATH: Final = "of"
"""The setting of an eviction, or of projections, that names the preset in whose pages rows rest."""


def make_evicting(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """The codec that the setting `of` names, with eviction of prompt rows. `settings` are those of both."""
    of = settings[BENEATH]
    ours = {key: settings.pop(key) for key in _RETENTION | _SELECTION if key in settings}
    retention = Retention.model_validate({key: value for key, value in ours.items() if key in _RETENTION})
    selection = SelectionSettings.model_validate({key: value for key, value in ours.items() if key in _SELECTION})
    codec = CODECS[of].make(name, shape, backend, {key: value for key, value in settings.items() if key != BENEATH})
    assert isinstance(codec, PagedCodec), "every codec of the table is one"
    written = ((key, str(value)) for key, value in (*retention, *selection))
    codec.settings = ((BENEATH, of), *written, *codec.settings)
    codec.eviction, codec.lossless = Evicting(codec, retention), False
    if not selection.select.everything:
        with_bounds(codec, backend.device)
        codec.selection = Selecting(selection, retention, codec.rows)
    return codec


def make_zack(name: str, shape: KvShape, backend: Backend, settings: dict[str, Any]) -> KvCodec:
    """A codec of projected rows in pages of the codec that the setting `of` names. `settings` are those of both."""
    of = settings.pop(BENEATH)
    ours = {key: settings.pop(key) for key in ZackSettings.model_fields if key in settings}
    chosen = ZackSettings.model_validate(ours)

    def below(narrow: KvShape) -> KvCodec:
        return CODECS[of].make(name, narrow, backend, dict(settings))

    codec = make_projecting(name, shape, backend, chosen, below)
    codec.settings = ((BENEATH, of), *codec.settings)
    return codec


_RETENTION: Final = frozenset(Retention.model_fields)
_SELECTION: Final = frozenset(SelectionSettings.model_fields)

_EXACT: Final = {"sink": 1, "recent": 2}
"""Exact pages are worth more than a bit where bits are few (lab/frontier/README.md)."""

CODECS: Final[dict[str, Preset]] = {
    "fp16": Preset(make_fp16),
    "fp8": Preset(make_floats, {"element": Element.E4M3, "scaling": Scaling.PAGE}),
    "mxfp8": Preset(make_floats, {"element": Element.E4M3, "scaling": Scaling.POWER}),
    "mxfp6": Preset(make_floats, {"element": Element.E2M3, "scaling": Scaling.POWER}),
    "mxfp4": Preset(make_floats, {"element": Element.E2M1, "scaling": Scaling.POWER}),
    "nvfp4": Preset(make_floats, {"element": Element.E2M1, "scaling": Scaling.TWOFOLD}),
    "kivi-4": Preset(make_kivi, {"k_bits": 4, "v_bits": 4}),
    "kivi-2": Preset(make_kivi, {"k_bits": 2, "v_bits": 2}),
    "kvquant-4": Preset(make_kvquant, {"k_bits": 4, "v_bits": 4}),
    "kvquant-2": Preset(make_kvquant, {"k_bits": 2, "v_bits": 2}),
    "cachegen": Preset(make_cachegen, {"level": "2", "wire_form": "zstd"}),
    "cachegen-eq86": Preset(make_cachegen, {"level": "eq86", "wire_form": "zstd"}),
    "cachegen-fp16": Preset(make_cachegen, {"level": "2", "resident": "fp16", "wire_form": "zstd"}),
    "cachegen-delta": Preset(make_cachegen, {"level": "2", "delta": True, "wire_form": "zstd"}),
    "kvcomp": Preset(make_kvcomp, {"wire_form": "zstd"}),
    "hack": Preset(make_hack),
    "hack-k4v2": Preset(make_hack, {"k_bits": 4}),
    "hack-paper": Preset(
        make_hack,
        {
            "rounding": Rounding.STOCHASTIC,
            "arithmetic": Arithmetic.ASYMMETRIC,
            "open_page": OpenPage.K_CODES,
            "send_sums": False,
        },
    ),
    "rot-k4v4": Preset(make_rotated, {"k_bits": 4, "v_bits": 4}),
    "rot-k4v4-window": Preset(make_rotated, {"k_bits": 4, "v_bits": 4, **_EXACT}),
    "rot-k3v3": Preset(make_rotated, {"k_bits": 3, "v_bits": 3, **_EXACT}),
    "rot-k3v2": Preset(make_rotated, {"k_bits": 3, "v_bits": 2, **_EXACT}),
    "rot-k2v2": Preset(make_rotated, {"k_bits": 2, "v_bits": 2, **_EXACT}),
    "streamingllm": Preset(make_evicting, {BENEATH: "fp16", "first": 4, "voters": 0}),
    "snapkv": Preset(make_evicting, {BENEATH: "fp16", "pool": 5}),
    "h2o": Preset(make_evicting, {BENEATH: "fp16", "last": "12.5%", "voters": "100%"}),
    "mpcache": Preset(
        make_evicting,
        {
            BENEATH: "fp16",
            "first": 4,
            "last": 64,
            "voters": "20%",
            "pairs": True,
            "select": "40%",
            "page_tokens": 32,
        },
    ),
    "zack": Preset(make_zack, {BENEATH: "fp16"}),
}


CALIBRATED: Final = tuple(name for name, preset in CODECS.items() if preset.make is make_rotated)
"""The presets that take the calibration which ships for a model."""

PROJECTED: Final = tuple(name for name, preset in CODECS.items() if preset.make is make_zack)
"""The presets that do not work without a calibration."""


def calibrates(config: CodecConfig) -> bool:
    """Whether a calibration of the kind that `CALIBRATED` presets take would make the codec better."""
    return config.name not in PROJECTED and beneath(config) in CALIBRATED


def beneath(config: CodecConfig) -> str:
    """The preset whose pages `config` has: its own, or the one that the setting `of` names."""
    preset = CODECS.get(config.name)
    if preset is None or BENEATH not in preset.settings:
        return config.name
    return str(config.settings.get(BENEATH, preset.settings[BENEATH]))


def make_codec(config: CodecConfig, shape: KvShape, backend: Backend) -> KvCodec:
    """Build the configured codec. Raises `ConfigError` naming the preset or the setting at fault.

    Every codec has the setting `wire_form`: a name of `WIRE_FORMS`, or `auto`, which codes where that saves time.
    Without it planes travel as they rest.
    """
    if config.name not in CODECS:
        raise ConfigError(f"codec.name: {config.name!r} is unknown; known: {', '.join(CODECS)}")
    preset = CODECS[config.name]
    settings = {**preset.settings, **config.settings}
    if BENEATH in preset.settings:
        of = beneath(config)
        if of not in CODECS or BENEATH in CODECS[of].settings:
            known = ", ".join(name for name in CODECS if BENEATH not in CODECS[name].settings)
            raise ConfigError(f"codec.settings.of: {of!r} is not a codec with pages of its own; known: {known}")
        settings = {**CODECS[of].settings, **settings}
    named = str(settings.pop("wire_form", RAW.name))
    form = _wire_form(CODER if named == AUTO else named)
    try:
        codec = preset.make(config.name, shape, backend, settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"codec.settings.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"codec.settings: {error}") from error
    codec.wire_form, codec.codes_where_it_pays = form, named == AUTO
    return codec


def _wire_form(name: str) -> WireForm:
    try:
        return wire_form(name)
    except ConfigError as error:
        raise ConfigError(f"codec.settings.wire_form: {error}") from error
