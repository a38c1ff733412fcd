"""Receives compressed KV and generates tokens on its codes."""
