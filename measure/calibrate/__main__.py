"""`hackkv calibrate [rot | kvquant | zack] [MODEL]`: fit codecs to a model, and write the file that their setting
`calibration` names.

The model reads text with exact attention. For the codecs rot-* (the default), moments of its keys and queries give each
KV head a basis in which codes lose least. With --target-bytes, the layers that suffer most get more bits than the
others; given several times, it does so for several presets. For kvquant-*, its keys and values say between what bounds
levels lie, and where; what an error counts follows from the loss's gradients (--sensitivity). For zack, moments of
keys, queries and values give each KV head rotations by which channels are sorted; how many of them stay is up to the
codec's settings. Every node of a cluster needs a file of the same bytes: copy it, do not make it again elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from hack_kernels.block_weight import as_numbers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save
from torch import Tensor

from hackkv.codecs.artifact import KVQUANT, METADATA, ROTATED, VERSION, ZACK, read_artifact
from hackkv.codecs.rotated import LayerBits
from hackkv.codecs.zack import Projections
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import EXACT_CODEC
from hackkv.errors import ConfigError, HackkvError
from hackkv.model.identity import source_hash
from hackkv.model.shipped import find_model
from hackkv.model.worker import Worker, load_worker
from hackkv.tokenizer import Tokenizer
from measure.calibrate.bits import TOKENS, bases_of, in_words, losses_of, passes, spend
from measure.calibrate.levels import SENSITIVITY, Sensitivity, gather_levels
from measure.calibrate.moments import counted_rows, gather
from measure.calibrate.projections import project
from measure.calibrate.solve import solve
from measure.calibrate.windows import TokenWindows, windows_of

FAMILIES: Final = (ROTATED, KVQUANT, ZACK)
REMOVALS: Final = (0.01, 0.05, 0.1, 0.2, 0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, write; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    family = given.pop(0) if given and given[0] in FAMILIES else ROTATED
    args = _parser(family).parse_args(given)
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        _check_out(args.out)
        worker, source, windows = _load(args)
        with _Bar(notes, windows.tokens) as bar:
            found, chosen = _fit(family, worker, windows, args.target_bytes, args.sensitivity, bar)
        about = _about(worker, source, windows) | {"codec": family}
        if args.sensitivity:
            about["sensitivity"] = args.sensitivity
        if chosen:
            about["layer_bits"] = [each.model_dump() for each in chosen]
        write_atomically(args.out, save(found, {METADATA: json.dumps(about, sort_keys=True)}))
    except HackkvError as error:
        notes.print(f"hackkv calibrate: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    said = f"wrote {args.out}: {worker.name}, {windows.tokens} tokens of {windows.source}"
    console.print(said, markup=False, soft_wrap=True)
    dim = worker.model.spec.head_dim
    for line in _removals(args.out, worker) if family == ZACK else [in_words(bits, dim) for bits in chosen]:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _parser(family: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hackkv calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default="", help="checkpoint folder or hub name; default: the shipped model"
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="UTF-8 text; default: sources of this Python's library that `hackkv eval` never scores",
    )
    parser.add_argument("--tokens", type=_positive, default=16384, help="how much text to read; default: 16384")
    parser.set_defaults(target_bytes=[], sensitivity=None)
    if family == ROTATED:
        parser.add_argument(
            "--target-bytes",
            type=_percentage,
            action="append",
            default=[],
            metavar="PERCENT",
            help="choose bits by layer: the best codec within this share of FP16's bytes, such as 14.5%%; repeatable",
        )
    if family == KVQUANT:
        parser.add_argument(
            "--sensitivity",
            type=Sensitivity,
            choices=list(Sensitivity),
            default=SENSITIVITY,
            help=f"what an error counts by: the loss's squared gradient (fisher), or all alike (none); "
            f"default: {SENSITIVITY}",
        )
    parser.add_argument("--out", type=Path, required=True, help="the file to write (.safetensors)")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--backend", default="auto", help="kernels; default: the fastest of this machine")
    parser.add_argument("--threads", type=_positive, default=os.cpu_count() or 1, help="default: all cores")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _percentage(text: str) -> float:
    value = float(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no percentage such as 14.5%")
    return value


def _check_out(out: Path) -> None:
    """Before the work and not after it."""
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such folder")


def _load(args: argparse.Namespace) -> tuple[Worker, str, TokenWindows]:
    """Everything that the run needs, and the hash of the model. Raises `ConfigError`, also if the text is too short."""
    folder = find_model(args.model, args.dtype)
    config = ModelConfig(path=str(folder.path), dtype=args.dtype, threads=args.threads, backend=args.backend)
    worker = replace(load_worker(config, CodecConfig(name=EXACT_CODEC)), name=folder.name)
    windows = windows_of(Tokenizer(folder.path), args.text, args.tokens, worker.model.spec.max_context)
    rows, needed = counted_rows(windows.windows), worker.model.spec.head_dim
    if rows < needed:
        raise ConfigError(
            f"{windows.source}: {windows.tokens} tokens leave {rows} rows to count; at least {needed} are needed"
        )
    return worker, source_hash(folder.path), windows


class _Bar:
    """A bar of what is under way, where there is a terminal."""

    def __init__(self, console: Console, tokens: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        silent = not console.is_terminal
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=silent)
        self._task = self._progress.add_task("tokens", total=tokens)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def next(self, what: str, total: int) -> None:
        """Something else begins."""
        self._progress.update(self._task, description=what, total=total, completed=0)

    def advance(self, count: int) -> None:
        """So much more is done."""
        self._progress.update(self._task, advance=count)


Tensors = dict[str, Tensor]


def _fit(
    family: str,
    worker: Worker,
    windows: TokenWindows,
    targets: Sequence[float],
    sensitivity: Sensitivity | None,
    bar: _Bar,
) -> tuple[Tensors, list[LayerBits]]:
    """The tensors of the file, by name, and bits by layer for each target."""
    if family == ZACK:
        return _project(worker, windows, bar), []
    if sensitivity is not None:
        return gather_levels(worker.model, windows.windows, bar.advance, sensitivity), []
    return _solve(worker, windows, targets, bar)


def _solve(
    worker: Worker, windows: TokenWindows, targets: Sequence[float], bar: _Bar
) -> tuple[Tensors, list[LayerBits]]:
    """For `rot-*`."""
    dim, solved, chosen = worker.model.spec.head_dim, list[Tensors](), list[LayerBits]()
    bases = bases_of(targets, dim)
    moments = gather(worker.model, windows.windows, bar.advance)
    bar.next("layers", len(moments))
    for each in moments:
        solved.append(solve(each))
        bar.advance(1)
    bar.next("bits", len(bases) * passes(len(solved)) * min(TOKENS, len(windows.windows[0])))
    for target, base in bases.items():
        losses = losses_of(worker.model, windows.windows[0], solved, base, bar.advance)
        chosen.append(spend(base, losses, target, dim))
    return _by_layer(solved), chosen


def _project(worker: Worker, windows: TokenWindows, bar: _Bar) -> Tensors:
    """For `zack`."""
    moments, rows = gather(worker.model, windows.windows, bar.advance), counted_rows(windows.windows)
    layers = worker.model.weights.layers
    return _by_layer([project(each, rows, as_numbers(layer.out)) for each, layer in zip(moments, layers, strict=True)])


def _removals(out: Path, worker: Worker) -> Iterator[str]:
    """For the user: what some rates of Eq. 6 leave."""
    found, dim = Projections.of(read_artifact(out), worker.model.spec.kv_shape), worker.model.spec.head_dim
    for removal in REMOVALS:
        k, v = found.means(removal)
        yield f"removal {removal:.0%}: heads keep {k:.1f} of {dim} channels of K and {v:.1f} of V"


def _by_layer(found: Sequence[Tensors]) -> Tensors:
    return {f"layers.{i}.{name}": tensor for i, each in enumerate(found) for name, tensor in each.items()}


def _about(worker: Worker, source: str, windows: TokenWindows) -> dict[str, object]:
    return {
        "version": VERSION,
        "model": worker.name,
        "model_hash": source,
        "dtype": dict(worker.fingerprint.fields)["dtype"],
        "text": windows.source,
        "text_sha256": windows.digest,
        "tokens": windows.tokens,
        "torch": torch.__version__,
    }


def write_atomically(out: Path, data: bytes) -> None:
    """Write `data` to `out`, which holds what it held until all of it is on the disk. Raises `ConfigError`."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{out}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
