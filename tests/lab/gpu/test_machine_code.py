"""The facts that are read from a disassembly."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from lab.gpu.machine_code import main_loop, parse


def test_the_parser_finds_the_innermost_loop_with_most_products() -> None:
    code = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMMA.16832.S8.S8 R4, R4, R2, R4 ;
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R4, R4, R2, R4 ;
        /*0050*/                   HMMA.16816.F32 R4, R4, R2, R4 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/              @UP0 BRA `(.L_x_0) ;
"""
    instructions, loops = parse(code)
    assert instructions[:3] == ["MOV", "IMMA.16832.S8.S8", "LDG.E.128"]
    assert loops == [(1, 4), (4, 7), (0, 8)]
    assert main_loop(instructions, loops) == (1, 4)
    assert main_loop(["MOV" if "IMMA" in name else name for name in instructions], loops) == (4, 7)
    assert main_loop(["MOV"] * len(instructions), loops) == (0, 8)
