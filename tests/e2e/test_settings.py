"""Settings that a node refuses only when it has loaded its model: one line that names them, and nothing left open."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from decode_node.__main__ import serve as serve_decode
from decode_node.config import DecodeConfig
from node.process import run_role
from prefill_node.__main__ import serve as serve_prefill
from prefill_node.config import PrefillConfig

COMMON = [
    ("kv_bytes=10", r"kv_bytes: 10 is less than one page of \d+ bytes"),
    (f"kv_bytes={1 << 60}", rf"kv_bytes: {1 << 60} is more than this machine's memory of \d+ bytes"),
    ("wire=inproc", r"wire: 'inproc': nodes can use grpc, gloo, nccl, nixl"),
    ("faults=/nowhere.yaml", r"/nowhere\.yaml: No such file or directory"),
]


def refusal(capfd: pytest.CaptureFixture[str]) -> str:
    """The text on standard error, including messages when a server that was left open is collected."""
    gc.collect()
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"), [*COMMON, ("chunk_tokens=1", r"chunk_tokens: 1 is less than a page.*")]
)
def test_a_prefill_node_refuses(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    settings = ["--set", f"model.path={checkpoint}", "--set", setting]
    assert run_role("prefill", PrefillConfig, serve_prefill, settings) == 2
    assert re.fullmatch(rf"prefill: {message}\n", refusal(capfd))


@pytest.mark.parametrize(("setting", "message"), COMMON)
def test_a_decode_node_refuses(checkpoint: Path, capfd: pytest.CaptureFixture[str], setting: str, message: str) -> None:
    settings = ["--set", f"model.path={checkpoint}", "--set", setting]
    assert run_role("decode", DecodeConfig, serve_decode, settings) == 2
    assert re.fullmatch(rf"decode: {message}\n", refusal(capfd))
