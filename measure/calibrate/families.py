"""The families of codecs that read a calibration file: one row of `FAMILIES` each. No other code names them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hack_kernels.block_weight import as_numbers
from torch import Tensor

from hackkv.codecs.artifact import KVQUANT, ROTATED, ZACK, read_artifact
from hackkv.codecs.rotated import LayerBits
from hackkv.codecs.zack import Projections
from hackkv.model.worker import Worker
from measure.calibrate.bits import TOKENS, bases_of, in_words, losses_of, passes, spend
from measure.calibrate.levels import SENSITIVITY, Sensitivity, gather_levels
from measure.calibrate.moments import counted_rows, gather
from measure.calibrate.progress import Bar
from measure.calibrate.projections import project
from measure.calibrate.solve import solve
from measure.calibrate.windows import TokenWindows

REMOVALS: Final = (0.01, 0.05, 0.1, 0.2, 0.3)
DEFAULT_FAMILY: Final = ROTATED

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a fit."""

    tensors: Tensors
    """Name -> tensor of the file."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """More facts for the file's metadata, as JSON."""
    bits: Sequence[LayerBits] = ()
    """Bits by layer, one for each target."""


@dataclass(frozen=True, slots=True)
class CodecFamily:
    """How one family of codecs is fitted to a model."""

    fit: Callable[[Worker, TokenWindows, argparse.Namespace, Bar], Fitted]
    """Read the text and solve. Raises `NonFiniteError`."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds the family's own options."""
    report: Callable[[Worker, Fitted, Path], Iterable[str]] = lambda worker, fitted, out: ()
    """Lines for the user, after the file is written."""


def _add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-bytes",
        type=_percentage,
        action="append",
        default=[],
        metavar="PERCENT",
        help="choose bits by layer: the best codec within this share of FP16's bytes, such as 14.5%%; repeatable",
    )


def _percentage(text: str) -> float:
    value = float(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no percentage such as 14.5%")
    return value


def _fit_rotations(worker: Worker, windows: TokenWindows, args: argparse.Namespace, bar: Bar) -> Fitted:
    dim, solved, chosen = worker.model.spec.head_dim, list[Tensors](), list[LayerBits]()
    bases = bases_of(args.target_bytes, dim)
    moments = gather(worker.model, windows.windows, bar.advance)
    bar.next("layers", len(moments))
    for each in moments:
        solved.append(solve(each))
        bar.advance(1)
    bar.next("bits", len(bases) * passes(len(solved)) * min(TOKENS, len(windows.windows[0])))
    for target, base in bases.items():
        losses = losses_of(worker.model, windows.windows[0], solved, base, bar.advance)
        chosen.append(spend(base, losses, target, dim))
    about = {"layer_bits": [each.model_dump() for each in chosen]} if chosen else {}
    return Fitted(_by_layer(solved), about, chosen)


def _bits_in_words(worker: Worker, fitted: Fitted, _: Path) -> Iterator[str]:
    for bits in fitted.bits:
        yield in_words(bits, worker.model.spec.head_dim)


def _add_sensitivity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sensitivity",
        type=Sensitivity,
        choices=list(Sensitivity),
        default=SENSITIVITY,
        help=f"what an error counts by: the loss's squared gradient (fisher), or all alike (none); "
        f"default: {SENSITIVITY}",
    )


def _fit_levels(worker: Worker, windows: TokenWindows, args: argparse.Namespace, bar: Bar) -> Fitted:
    tensors = gather_levels(worker.model, windows.windows, bar.advance, args.sensitivity)
    return Fitted(tensors, {"sensitivity": args.sensitivity})


def _fit_projections(worker: Worker, windows: TokenWindows, _: argparse.Namespace, bar: Bar) -> Fitted:
    moments, rows = gather(worker.model, windows.windows, bar.advance), counted_rows(windows.windows)
    layers = zip(moments, worker.model.weights.layers, strict=True)
    return Fitted(_by_layer([project(each, rows, as_numbers(layer.out)) for each, layer in layers]))


def _removals(worker: Worker, _: Fitted, out: Path) -> Iterator[str]:
    """Lines that say how many channels stay at some removal rates (ZACK, Eq. 6)."""
    found, dim = Projections.of(read_artifact(out), worker.model.spec.kv_shape), worker.model.spec.head_dim
    for removal in REMOVALS:
        k, v = found.means(removal)
        yield f"removal {removal:.0%}: heads keep {k:.1f} of {dim} channels of K and {v:.1f} of V"


def _by_layer(found: Sequence[Tensors]) -> Tensors:
    return {f"layers.{i}.{name}": tensor for i, each in enumerate(found) for name, tensor in each.items()}


FAMILIES: Final[Mapping[str, CodecFamily]] = MappingProxyType(
    {
        ROTATED: CodecFamily(_fit_rotations, add_options=_add_targets, report=_bits_in_words),
        KVQUANT: CodecFamily(_fit_levels, add_options=_add_sensitivity),
        ZACK: CodecFamily(_fit_projections, report=_removals),
    }
)
"""Name -> family."""
