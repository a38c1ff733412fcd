"""The check before a cluster starts: can it serve this model with this codec? A role of the fork server (`ROLES`).

The process writes its findings to standard output, one JSON object a line:

    {"found": {"folder": ..., "name": ..., "devices": [...]}}
                                                folder of the checkpoint, name of the model, devices of nodes
    {"say": ...}                                a line for the operator
    {"passed": {...} or null}                   the end: the codec's loss (`CodecLoss`), null if it loses nothing
    {"failed": ..., "setting": true or false}   the end: why not, and whether a setting or file is to blame

It computes on all cores and may open a context of CUDA, so it must not be the fork server itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hackkv.canary import check_codec
from hackkv.config import CodecConfig, Frozen, ModelConfig, load
from hackkv.errors import ConfigError, HackkvError
from hackkv.model.device import places
from hackkv.model.worker import check_worker, model_folder


class CheckConfig(Frozen):
    """The model and the codec to be served."""

    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()


def main(argv: Sequence[str]) -> int:
    """Check the model and codec of the configuration file `argv[0]`; return the exit code."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        config = load(CheckConfig, Path(argv[0]))
        found, devices = model_folder(config.model), places(config.model)
        _tell(found={"folder": str(found.path), "name": found.name, "devices": devices})
        model = config.model.model_copy(update={"device": devices[0]})
        check_worker(model.model_copy(update={"path": str(found.path)}), config.codec)
        loss = check_codec(model, config.codec, lambda line: _tell(say=line))
        _tell(passed=asdict(loss) if loss else None)
    except HackkvError as error:
        _tell(failed=str(error), setting=isinstance(error, ConfigError))
        return 1
    return 0


def _end_with_stdin() -> None:
    """End this process when its standard input ends, which happens however the cluster ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def _tell(**message: object) -> None:
    print(json.dumps(message), flush=True)
