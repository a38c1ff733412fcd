"""`hackkv calibrate [rot | kvquant | zack] [MODEL]`: fit codecs to a model, and write the file that their setting
`calibration` names.

The model reads text with exact attention. For the codecs rot-* (the default), moments of its keys and queries give each
KV head a basis in which codes lose least. With --target-bytes, the layers that suffer most get more bits than the
others; given several times, it does so for several presets. For kvquant-*, its keys and values determine the bounds and
places of the levels; the loss's gradients say how much an error counts (--sensitivity). For zack, moments of keys,
queries and values give each KV head rotations by which channels are sorted; the codec's settings say how many of them
stay. Every node of a cluster needs a file of the same bytes: copy it, do not make it again elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save

from hackkv.codecs.artifact import METADATA, VERSION
from hackkv.config import CodecConfig, ModelConfig
from hackkv.defaults import EXACT_CODEC
from hackkv.errors import ConfigError, HackkvError
from hackkv.model.identity import source_hash
from hackkv.model.shipped import find_model
from hackkv.model.worker import Worker, load_worker
from hackkv.tokenizer import Tokenizer
from measure.calibrate.families import DEFAULT_FAMILY, FAMILIES, CodecFamily
from measure.calibrate.moments import counted_rows
from measure.calibrate.progress import Bar
from measure.calibrate.windows import TokenWindows, windows_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, write; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and given[0] in FAMILIES else DEFAULT_FAMILY
    family = FAMILIES[name]
    args = _parser(family).parse_args(given)
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        _check_out(args.out)
        worker, source, windows = _load(args)
        with Bar(notes, windows.tokens) as bar:
            fitted = family.fit(worker, windows, args, bar)
        about = _about(worker, source, windows) | {"codec": name} | dict(fitted.about)
        write_atomically(args.out, save(fitted.tensors, {METADATA: json.dumps(about, sort_keys=True)}))
    except HackkvError as error:
        notes.print(f"hackkv calibrate: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    said = f"wrote {args.out}: {worker.name}, {windows.tokens} tokens of {windows.source}"
    console.print(said, markup=False, soft_wrap=True)
    for line in family.report(worker, fitted, args.out):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _parser(family: CodecFamily) -> argparse.ArgumentParser:
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
    family.add_options(parser)
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


def _check_out(out: Path) -> None:
    """Check before the work that the output can be written. Raises `ConfigError`."""
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such folder")


def _load(args: argparse.Namespace) -> tuple[Worker, str, TokenWindows]:
    """The worker, the hash of its model, and the windows. Raises `ConfigError`, also if the text is too short."""
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
    """Write `data` to `out`, which keeps its old content until all of it is on the disk. Raises `ConfigError`."""
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
