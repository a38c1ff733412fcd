"""What a kernel costs, read from its machine code, without a GPU: `python -m hack_kernels.triton.inspect`.

Compiles every registered kernel for every architecture with Triton's own assembler and prints registers, spills, matrix
instructions, loads, and the instructions that a warp issues in the main loop. Register kernels in `examples.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hack_kernels.triton.examples import EXAMPLES, GRID, NAMED, Example
from hack_kernels.triton.launch import Launch

ARCHITECTURES: Final = (80, 86, 89, 90, 100)
SPECIALIZED_DIVISOR: Final = 16
"""Triton compiles arguments that are multiples of this into kernels that know it."""
WARP_LOAD_BYTES: Final = 32 * 16
"""What a warp gets with one 16-byte load per lane."""
TIMEOUT_S: Final = 300

COLUMNS: Final = {
    "name": ("kernel", 44),
    "arch": ("sm", 5),
    "registers": ("regs", 6),
    "local_accesses": ("spills", 8),
    "loop": ("loop", 7),
    "loop_per_64_tokens": ("/64 tok", 9),
    "int8_mma": ("imma", 6),
    "float_mma": ("hmma", 6),
    "code_loads": ("codes", 7),
    "loads_128": ("ld128", 7),
    "loads_64": ("ld64", 6),
    "loads_narrower": ("ld<64", 7),
    "barriers": ("bar", 5),
    "instructions": ("all", 7),
}
"""Field of a report -> title and width in the printed table."""

_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
_LABEL: Final = re.compile(r"^\s*(\.L_x?_?\d+):")
_TARGET: Final = re.compile(r"\((\.L_x?_?\d+)\)")


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code of one kernel says. Counts are warp-instructions."""

    name: str
    arch: int
    registers: int
    shared_bytes: int
    local_accesses: int
    instructions: int
    loop: int
    """Instructions of the main loop (`main_loop`), to which the counts below belong."""
    int8_mma: int
    float_mma: int
    code_loads: int
    """16-byte loads that a warp needs for its share of the codes, each once; `loads_128` may not be below."""
    loads_128: int
    loads_64: int
    loads_narrower: int
    barriers: int
    loop_per_64_tokens: int | None


def compile_offline(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel for sm_`arch`. Needs no GPU; Triton caches it on disk."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else _type_of(value)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = value
        elif isinstance(value, Tensor) or value % SPECIALIZED_DIVISOR == 0:
            attributes[(i,)] = [["tt.divisibility", SPECIALIZED_DIVISOR]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def inspect(example: Example, arch: int) -> Report:
    """Compile and read one kernel."""
    compiled = compile_offline(example.launch, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin))
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
    instructions, loops = parse(code)
    begin, end = main_loop(instructions, loops)
    inside = Counter(instructions[begin:end])

    def count(*parts: str) -> int:
        return sum(n for name, n in inside.items() if all(part in name for part in parts))

    return Report(
        name=example.name,
        arch=arch,
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        shared_bytes=compiled.metadata.shared,
        local_accesses=sum(name.startswith(("LDL", "STL")) for name in instructions),
        instructions=len(instructions),
        loop=end - begin,
        int8_mma=count("IMMA") + count("IGMMA"),
        float_mma=count("HMMA") + count("HGMMA"),
        code_loads=-(-example.code_bytes // (example.launch.warps * WARP_LOAD_BYTES)),
        loads_128=count("LDG", ".128"),
        loads_64=count("LDG", ".64"),
        loads_narrower=count("LDG") - count("LDG", ".128") - count("LDG", ".64"),
        barriers=count("BAR"),
        loop_per_64_tokens=round((end - begin) * 64 / example.tokens) if example.tokens else None,
    )


def inspect_named(name: str, arch: int) -> Report:
    """`inspect` of the example of this name."""
    return inspect(NAMED[name], arch)


def parse(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """nvdisasm's text -> instruction names in order, and loops as ranges of them (from a backward branch's target)."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := _LABEL.match(line):
            places[label.group(1)] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append(found.group(1))
            target = _TARGET.search(found.group(2))
            if found.group(1).startswith("BRA") and target and target.group(1) in places:
                loops.append((places[target.group(1)], len(instructions)))
    return instructions, loops


def main_loop(instructions: Sequence[str], loops: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The innermost loop with most INT8 products, or with most products if none has any; all code without products.

    INT8 counts first because the own page's FP16 products are narrower and so more of them.
    """
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]

    def weight(loop: tuple[int, int]) -> tuple[int, int]:
        names = instructions[slice(*loop)]
        return sum("IMMA" in name or "IGMMA" in name for name in names), sum("MMA" in name for name in names)

    best = max(inner, key=weight, default=(0, 0))
    return best if best != (0, 0) and weight(best)[1] else (0, len(instructions))


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
        return "*" + (names.get(value.dtype) or f"i{value.dtype.itemsize * 8}")
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout


def main() -> None:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m hack_kernels.triton.inspect", description=__doc__)
    parser.add_argument("--kernel", nargs="*", choices=sorted(NAMED), metavar="NAME")
    parser.add_argument("--grid", action="store_true", help="every kernel at every size and width; an hour of one core")
    parser.add_argument("--arch", nargs="*", type=int, choices=ARCHITECTURES, default=ARCHITECTURES, metavar="SM")
    parser.add_argument("--list", action="store_true", help="print the names of the kernels and stop")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel and architecture")
    options = parser.parse_args()
    chosen = [example.name for example in (GRID if options.grid else EXAMPLES)]
    names = list(dict.fromkeys(options.kernel or chosen))
    if options.list:
        print("\n".join(names))
        return
    if not options.json:
        print("".join(f"{title:>{width}}" for title, width in COLUMNS.values()))
    pairs = [(name, arch) for name in names for arch in options.arch]
    # Processes, as Triton's compiler is for one thread; each takes one pair after another.
    with ProcessPoolExecutor(min(len(pairs), os.cpu_count() or 1), get_context("spawn")) as pool:
        for report in map(asdict, pool.map(inspect_named, *zip(*pairs, strict=True))):
            line = "".join(f"{'-' if report[key] is None else report[key]:>{w}}" for key, (_, w) in COLUMNS.items())
            print(json.dumps(report) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
