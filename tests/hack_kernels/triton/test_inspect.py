"""Gates on machine code, compiled here without a GPU.

Triton keeps what it compiled on disk; a first run takes a CPU minute. `python -m hack_kernels.triton.inspect` prints
the whole table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from hack_kernels.triton.inspect import main_loop, parse

DECODE = "decode D=128 Π=64 K2V2 G=8"
SMALL = "decode D=64 Π=64 K2V2 G=8"
TIMEOUT_S = 280


def reports(kernels: list[str], architectures: list[int]) -> list[dict[str, Any]]:
    """From a process whose Triton compiles instead of interpreting."""
    command = [sys.executable, "-m", "hack_kernels.triton.inspect", "--json", "--kernel", *kernels]
    command += ["--arch", *map(str, architectures)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100])
def test_decode_is_made_of_what_it_should_be(architecture: int) -> None:
    """INT8 products, codes in 16-byte loads and nothing narrower than a lane's metadata, no spills."""
    (report,) = reports([SMALL], [architecture])
    assert report["local_accesses"] == 0
    assert report["int8_mma"] == 16 + 2  # 2·64·64 codes in 512 a product, and the sums of P
    assert report["float_mma"] == 0
    assert report["loads_128"] == 4  # 2 KiB of codes in 512 bytes a load
    assert report["loads_narrower"] == 0


def test_a_page_stays_below_its_budget_on_hopper() -> None:
    """850 warp-instructions per 64 tokens, K and V, 8 queries: an H200's memory leaves about 1,100."""
    (report,) = reports([DECODE], [90])
    assert report["loop_per_64_tokens"] <= 850
    assert report["local_accesses"] == 0
    assert report["int8_mma"] == 34
    assert report["loads_128"] == 8
    assert report["registers"] <= 168


def test_the_parser_finds_the_innermost_loop_with_most_products() -> None:
    code = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMMA.16832.S8.S8 R4, R4, R2, R4 ;
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/              @UP0 BRA `(.L_x_0) ;
"""
    instructions, loops = parse(code)
    assert instructions[:3] == ["MOV", "IMMA.16832.S8.S8", "LDG.E.128"]
    assert loops == [(1, 4), (4, 6), (0, 7)]
    assert main_loop(instructions, loops) == (1, 4)
