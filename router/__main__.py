"""`python -m router --config F [--set key=value ...]`: run the router.

Exit codes: 0 after SIGTERM or SIGINT, 2 if the configuration or the checkpoint is wrong (one line on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

import yaml

from hackkv.config import load
from hackkv.errors import ConfigError
from hackkv.tokenizer import Tokenizer
from router.config import RouterConfig
from router.service import serve


def main(arguments: list[str] | None = None) -> int:
    """Run the router; return the exit code."""
    parser = argparse.ArgumentParser(prog="router", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, help="YAML file, see router/config.py")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load(RouterConfig, options.config, dict(_override(text) for text in options.set))
        tokenizer = Tokenizer(config.model)
        asyncio.run(serve(config, tokenizer))
    except ConfigError as error:
        print(f"router: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _override(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
