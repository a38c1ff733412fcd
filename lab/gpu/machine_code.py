"""Reports on a kernel's machine code, compiled by Triton's own assembler for any architecture, without a GPU.

`inspect.py` prints the reports for the kernels that `examples.py` lists.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from hack_kernels.triton.launch import Launch
from torch import Tensor
from triton._C.libtriton import ir
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.tools.tensor_descriptor import TensorDescriptor

from lab.gpu.absent import target_of
from lab.gpu.example import Example

ARCHITECTURES: Final = (80, 86, 89, 90, 100)
SPECIALIZED_DIVISOR: Final = 16
"""Triton specializes a kernel for arguments that are multiples of this number."""
WARP_LOAD_BYTES: Final = 32 * 16
"""Bytes that a warp reads with one 16-byte load per lane."""
TIMEOUT_S: Final = 300

_CONSTANT: Final = re.compile(r"^ *(%[\w.$-]+) = (arith\.constant .*)$")
_VALUE: Final = re.compile(r"%[\w.$-]+")
_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
_LABEL: Final = re.compile(r"^\s*(\.L_x?_?\d+):")
_TARGET: Final = re.compile(r"\((\.L_x?_?\d+)\)")


@dataclass(frozen=True, slots=True)
class Report:
    """Measures of one kernel's machine code. Counts are warp-instructions."""

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
    """16-byte loads that a warp needs to read its share of the codes once; a lower bound of `loads_128`."""
    loads_128: int
    async_128: int
    """The part of `loads_128` that goes to shared memory past registers."""
    loads_64: int
    loads_narrower: int
    blocks: int
    """Blocks of a tensor that a unit of Hopper and later ones (TMA) copies to shared memory, an instruction each."""
    barriers: int
    loop_per_64_tokens: int | None
    fingerprint: str


def generation(arch: int) -> int:
    """Architectures of one generation (8: Ampere and Ada) share Triton's passes up to its GPU dialect."""
    return arch // 10


def intermediate_code(launch: Launch, arch: int) -> str:
    """Triton's first intermediate code (TTIR) without line numbers: all that its later passes see of a kernel.

    It takes a second, where machine code takes minutes. Kernels whose intermediate code, options and Triton are equal
    have equal machine code, wherever their source is and however it is written.
    """
    with target_of(arch) as target:
        backend = make_backend(target)
        options = backend.parse_options(dict(launch.options))
        context = _context(backend)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = _source(launch).make_ir(target, options, functions, modules, context)
    return _constants_in_place(backend.make_ttir(module, {}, options, arch).str_nodebug())


def _code_of(compiled: Any) -> str:
    """`intermediate_code` from the text that Triton kept in a compiled kernel: making it again takes up to seconds."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kernel.ttir"
        kept.write_text(compiled.asm["ttir"])
        context = _context(make_backend(compiled.metadata.target))  # must outlive the module
        return _constants_in_place(ir.parse_mlir_module(str(kept), context).str_nodebug())


def _context(backend: Any) -> Any:
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return context


def _constants_in_place(code: str) -> str:
    """`code` with constants inlined and other values renumbered: the order of constants affects no instruction."""
    names: dict[str, str] = {}

    def renamed(name: re.Match[str]) -> str:
        return names.setdefault(name[0], f"%{len(names)}")

    lines = []
    for line in code.splitlines():
        if constant := _CONSTANT.match(line):
            names[constant[1]] = constant[2]
        else:
            lines.append(_VALUE.sub(renamed, line))
    return "\n".join(lines)


def fingerprint(launch: Launch, arch: int) -> str:
    """A digest of everything that determines the machine code: intermediate code, options, Triton."""
    return _digest(launch, arch, intermediate_code(launch, arch))


def _digest(launch: Launch, arch: int, code: str) -> str:
    known = triton.__version__, code, sorted(launch.options.items()), arch
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def compile_offline(launch: Launch, architectures: Sequence[int]) -> list[Any]:
    """Triton's compiled kernels, which it caches on disk. Needs no GPU; the architectures are of one generation.

    Most of the time goes into Triton's own passes, which depend on the generation alone. So they run for the first
    architecture only. The others start from its result, in which only the name of the target is replaced.
    """
    first, *others = architectures
    with target_of(first) as target:
        compiled = [triton.compile(_source(launch), target=target, options=launch.options)]
    for arch in others:
        with tempfile.TemporaryDirectory() as folder:
            passed = Path(folder) / "kernel.ttgir"
            passed.write_text(compiled[0].asm["ttgir"].replace(f'"cuda:{first}"', f'"cuda:{arch}"'))
            with target_of(arch) as target:
                compiled.append(triton.compile(str(passed), target, launch.options))
    return compiled


def inspect(example: Example, architectures: Sequence[int]) -> list[Report]:
    """Compile and read one kernel for architectures of one generation, whose intermediate code is the same."""
    compiled = compile_offline(example.launch, architectures)
    code = _code_of(compiled[0])
    return [_report(example, arch, kernel, code) for arch, kernel in zip(architectures, compiled, strict=True)]


def faults(example: Example, report: Report) -> list[str]:
    """The gates that a kernel fails: local memory, INT8 products where codes are multiplied, 16-byte loads of codes."""
    found = []
    if report.local_accesses:
        found.append(f"{report.local_accesses} accesses to local memory")
    if example.int8 and not report.int8_mma:
        found.append("no INT8 product")
    if report.loads_128 < report.code_loads:
        found.append(f"{report.loads_128} loads of 16 bytes where codes take {report.code_loads}")
    return found


def _report(example: Example, arch: int, compiled: Any, code: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        disassembly = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin))
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
    instructions, loops = parse(disassembly)
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
        async_128=count("LDGSTS", ".128"),
        loads_64=count("LDG", ".64"),
        loads_narrower=sum(
            n
            for name, n in inside.items()
            if name.startswith(("LDG.", "LDGSTS.")) and not {"128", "64"} & {*name.split(".")}
        ),
        blocks=count("UTMALDG"),
        barriers=count("BAR"),
        loop_per_64_tokens=round((end - begin) * 64 / example.tokens) if example.tokens else None,
        fingerprint=_digest(example.launch, arch, code),
    )


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
    """The innermost loop with most INT8 products; without any, that with most products of any kind; else all code.

    INT8 counts first, because the FP16 products of the own page are narrower and so more numerous.
    """
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]

    def weight(loop: tuple[int, int]) -> tuple[int, int]:
        names = instructions[slice(*loop)]
        return sum("IMMA" in name or "IGMMA" in name for name in names), sum("MMA" in name for name in names)

    best = max(inner, key=weight, default=(0, 0))
    return best if best != (0, 0) and weight(best)[1] else (0, len(instructions))


def _source(launch: Launch) -> ASTSource:
    """The kernel as Triton's launcher specializes it: arguments equal to 1 and multiples of 16 are compiled in."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialized = not (isinstance(value, Tensor | TensorDescriptor) or parameter.do_not_specialize)
        if parameter.is_constexpr or value is None or (specialized and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, Tensor) or (specialized and value % SPECIALIZED_DIVISOR == 0):
            attributes[(i,)] = [["tt.divisibility", SPECIALIZED_DIVISOR]]
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_type_of(value.base)[1:]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
        return "*" + (names.get(value.dtype) or f"i{value.dtype.itemsize * 8}")
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
