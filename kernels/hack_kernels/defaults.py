"""Defaults of page formats and codecs."""

from __future__ import annotations

from typing import Final

DEFAULT_PAGE_TOKENS: Final = 64
"""Π, as in HACK: rows of a page."""
