"""`python -m hackkv.model.gguf FILE [--dtype NAME] [--weights FORM]`: convert a GGUF file once; print its folder.

`hackkv serve` does this by itself. A router that is started alone loads no torch and cannot: give it this folder.
"""

from __future__ import annotations

import argparse
import sys

from hackkv.errors import ConfigError
from hackkv.model.dtypes import DTYPES
from hackkv.model.packing import AUTO, CHOICES
from hackkv.model.shipped import find_model


def main() -> int:
    """Convert and print; returns the exit code."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file, unless it has been; print its folder.")
    parser.add_argument("file", help="a GGUF file, or smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--weights", default=AUTO, choices=CHOICES)
    options = parser.parse_args()
    try:
        print(find_model(options.file, options.dtype, options.weights).path)
    except ConfigError as error:
        print(f"hackkv: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
