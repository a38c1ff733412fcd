"""How often tests look at what another thread or process does, where no event tells of it."""

from __future__ import annotations

from typing import Final

POLL_S: Final = 0.001
"""Seconds between two looks. Looking all the time would take the core of what is waited for."""
