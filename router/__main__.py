"""`python -m router --config FILE [--set key=value]`: load the tokenizer, open two ports, serve until told to stop."""

from __future__ import annotations

import sys

from hackkv.process import run_role
from router.config import RouterConfig
from router.service import serve

if __name__ == "__main__":
    sys.exit(run_role("router", RouterConfig, serve))
