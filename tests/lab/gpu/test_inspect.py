"""Gates on the machine code of every kernel for every architecture, compiled here without a GPU.

Triton keeps compiled kernels on disk; a first run takes minutes of CPU time. `python -m lab.gpu.inspect` prints
the whole table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from lab.gpu.examples import GRID
from lab.gpu.machine_code import ARCHITECTURES

DECODE = "decode D=128 Π=64 K2V2 G=8"
TOGETHER = (f"{DECODE} batch 32", "decode levels D=128 Π=64 K3V2 window 1+2 G=4 batch 32")
"""Every batch of more than one sequence, of codec `hack` and of the default."""
TIGHTEST = {
    "decode D=256 Π=128 K4V4 asymmetric G=8": (100, 2 * 64 + 4),
    "prefill D=256 Π=128 K4V4 asymmetric G=4": (90, 2 * 32),
}
"""Kernels that have spilled before, since they need every register -> the architecture and the INT8 products."""
IN_LANES = {"barriers": 0}
"""Weights reach V's operand without shared memory, so that no warp waits for another."""
WITH_CODES = {
    "decode D=64 Π=64 K2V2 G=8": IN_LANES | {"int8_mma": 16 + 2, "float_mma": 0, "loads_128": 4, "loads_narrower": 1},
    "decode D=64 Π=64 K2V2 asymmetric G=8": IN_LANES | {"int8_mma": 16 + 2, "float_mma": 0, "loads_128": 4},
    "dequantize D=64 Π=64 K2V2 G=8": {"int8_mma": 0, "float_mma": 32 + 4, "loads_128": 4, "loads_narrower": 1},
    "prefill D=128 Π=64 K2V2 G=4": {"int8_mma": 32, "float_mma": 0, "loads_128": 2 + 1},
    "install D=64 Π=64 K2V2": {"int8_mma": 0, "float_mma": 0},
    "export D=64 Π=64 K2V2": {"int8_mma": 0, "float_mma": 0},
}
"""Kernels whose main loop is known, on every architecture: products of 16x8 with 32 codes or 16 values, of which the
last in decode are sums of P, and 2 KiB of codes, 16 bytes a lane. In prefill 128 lanes load 4 KiB, K once per
partition. The narrow load in decode is the number of a page to come."""
OF_LEVELS = {
    "decode levels D=64 Π=64 K4V4 G=3": IN_LANES
    | {"int8_mma": 16 + 2, "float_mma": 0, "loads_128": 8, "loads_narrower": 1},
    "decode levels D=64 Π=64 K3V3 window 1+2 G=3": IN_LANES | {"int8_mma": 32 + 2, "float_mma": 0, "loads_narrower": 1},
    "prefill levels D=64 Π=64 K3V3 window 1+2 G=3": {"int8_mma": 32, "float_mma": 0},
    "seal levels D=128 Π=64 K3V3 window 1+2": {"int8_mma": 0, "float_mma": 0},
    "install levels D=64 Π=64 K3V3 window 1+2": {"int8_mma": 0, "float_mma": 0},
}
"""Pages of levels, on sm_90. Codes of 3 bits take two products, of 2 bits and of 1."""
OF_NUMBERS = {
    "decode e2m1 power D=64 Π=64 G=3": 8 + 1,
    "decode e2m1 twofold D=64 Π=64 G=3": 8 + 1,
    "seal e2m1 power D=64 Π=64": 0,
    "seal e2m1 twofold D=64 Π=64": 0,
    "decode groups K4V4 D=64 Π=64 G=3": 8 + 1 + 2,
    "seal groups K4V4 D=64 Π=64": 0,
    "decode centred K5V4 D=64 Π=64 G=3": 8 + 1,
    "seal centred K5V4 D=64 Π=64": 0,
}
"""Pages of FP4, KIVI and centred codes, on every architecture -> products of FP16 in decode, including those of KIVI's
minima."""
READ_ONE_BY_ONE = (
    *("decode e4m3 page D=64 Π=64 G=3", "decode e4m3 power D=64 Π=64 G=3", "decode e2m3 power D=64 Π=64 G=3"),
    *("seal e4m3 page D=64 Π=64", "seal e4m3 power D=64 Π=64", "seal e2m3 power D=64 Π=64"),
    *("decode e2m1 power D=128 Π=64 G=8", "decode e2m1 twofold D=128 Π=64 G=8", "decode e2m3 power D=128 Π=64 G=8"),
    *("decode groups K2V2 D=64 Π=64 G=3", "decode groups K2V2 D=128 Π=64 G=4", "decode groups K4V4 D=128 Π=64 G=4"),
    *("seal groups K2V2 D=64 Π=64", "seal groups K4V4 D=128 Π=64"),
    *("decode centred K5V5 D=128 Π=64 G=4", "decode centred K4V4 D=128 Π=64 G=4", "seal centred K5V5 D=128 Π=64"),
    "seal e2m3 power D=96 Π=64",  # has spilled
)
"""Pages of FP8, FP6 and integer codes in groups, and wider heads, on sm_90."""
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Architecture -> the most shared memory of a program, in KiB."""
CHECKSUMS = ("checksum XXH3 blocks", "checksum XXH3 chain")
OF_ROWS = ("rows D=64 Π=64 G=8", "seal D=64 Π=64 K2V2 nearest")
"""Kernels that read FP16 rows, on every architecture."""
ROWS = "rows D=128 Π=64 G=8"
DENSE = "dense D=64 Π=64 G=3"
WIDE_DENSE = ("dense D=128 Π=64 G=4", "dense D=256 Π=64 G=4")
"""Prompts that read dequantized pages: wider ones take the most shared memory of all kernels."""

SIZES = [f"D={d} Π={pi} K{bits}V{bits}" for d, pi, bits in (
    (64, 32, 4), (64, 128, 2), (96, 32, 2), (96, 64, 4), (96, 128, 2), (128, 32, 2), (128, 128, 4), (256, 32, 4),
)]  # fmt: skip
"""Every head_dim, page size and width of the grid, but not every combination; `inspect --grid` compiles all."""
SAMPLED = [
    example.name
    for example in GRID
    if any(size in example.name for size in SIZES)
    and (example.name.startswith("prefill") or ("asymmetric" in example.name) == example.name.startswith("install"))
    and example.name.startswith(("prefill", "install", "export"))
]
SAMPLED_ON = 100
"""The architecture with the fewest registers."""
TIMEOUT_S = 1500
pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.slow]

Reports = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def reports() -> Reports:
    """(kernel, architecture) -> report, from a process whose Triton compiles instead of interpreting."""
    lines = inspected([*WITH_CODES, *OF_ROWS, *OF_NUMBERS, *CHECKSUMS, DENSE], list(ARCHITECTURES))
    lines += (
        inspected([DECODE, ROWS, *OF_LEVELS, *READ_ONE_BY_ONE], [90])
        + inspected([*TOGETHER], [80, 90])
        + inspected([*WIDE_DENSE], [86, 90])
        + inspected(SAMPLED, [SAMPLED_ON])
    )
    for kernel, (arch, _) in TIGHTEST.items():
        lines += inspected([kernel], [arch])
    return {(report["name"], report["arch"]): report for report in lines}


def inspected(kernels: list[str], architectures: list[int], *more: str) -> list[dict[str, Any]]:
    """The lines that the tool prints."""
    command = [sys.executable, "-m", "lab.gpu.inspect", "--json", "--kernel", *kernels]
    command += ["--arch", *map(str, architectures), *more]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(kernels) * len(architectures), done.stderr
    return lines


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", [*WITH_CODES, *OF_ROWS, *OF_NUMBERS, *CHECKSUMS, DENSE])
def test_nothing_spills(reports: Reports, kernel: str, arch: int) -> None:
    assert reports[kernel, arch]["local_accesses"] == 0


def test_every_kernel_fits_the_shared_memory_of_its_architecture(reports: Reports) -> None:
    """Otherwise the launch fails on such a GPU. Source: CUDA C++ programming guide."""
    asked = {key: report["shared_bytes"] for key, report in reports.items()}
    assert {arch for _, arch in asked} <= SHARED_KIB.keys()
    assert {key: size for key, size in asked.items() if size > SHARED_KIB[key[1]] << 10} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", WITH_CODES)
def test_a_page_of_codes_costs_what_it_should(reports: Reports, kernel: str, arch: int) -> None:
    report = reports[kernel, arch]
    assert {name: report[name] for name in WITH_CODES[kernel]} == WITH_CODES[kernel]
    assert report["loads_128"] >= report["code_loads"] > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", OF_ROWS)
def test_rows_are_read_16_bytes_a_lane(reports: Reports, kernel: str, arch: int) -> None:
    """A tile of K and of V is 32 KiB, which 256 lanes share; a page to seal is 16 KiB, which 128 lanes share."""
    assert reports[kernel, arch]["loads_128"] == 8
    assert reports[kernel, arch]["loads_narrower"] == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_to_come_are_on_their_way_while_others_are_multiplied(reports: Reports, arch: int) -> None:
    report = reports["rows D=64 Π=64 G=8", arch]
    assert report["async_128"] == report["loads_128"]
    assert report["float_mma"] == 16


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_copy_blocks_where_a_unit_does_that_and_else_read_16_bytes_a_lane(reports: Reports, arch: int) -> None:
    """A block of K and of V is 8 KiB, which 256 lanes share."""
    report = reports[DENSE, arch]
    assert (report["blocks"], report["async_128"]) == ((2, 0) if arch >= 90 else (0, 4))
    assert report["loads_narrower"] == 0


@pytest.mark.parametrize("kernel", SAMPLED)
def test_other_sizes_and_widths_pass_the_gates_too(reports: Reports, kernel: str) -> None:
    report = reports[kernel, SAMPLED_ON]
    assert report["local_accesses"] == 0
    assert report["loads_128"] >= report["code_loads"] > 0
    assert (report["int8_mma"] > 0) == kernel.startswith("prefill")


@pytest.mark.parametrize("kernel", OF_LEVELS)
def test_pages_of_levels_pass_the_gates_too(reports: Reports, kernel: str) -> None:
    report = reports[kernel, 90]
    assert report["local_accesses"] == 0
    assert {name: report[name] for name in OF_LEVELS[kernel]} == OF_LEVELS[kernel]
    assert report["loads_128"] >= report["code_loads"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", OF_NUMBERS)
def test_pages_of_four_bits_are_multiplied_as_fp16_and_tf32(reports: Reports, kernel: str, arch: int) -> None:
    assert reports[kernel, arch]["float_mma"] == OF_NUMBERS[kernel]
    assert reports[kernel, arch]["int8_mma"] == 0


@pytest.mark.parametrize("kernel", READ_ONE_BY_ONE)
def test_other_pages_that_are_read_one_by_one_do_not_spill_either(reports: Reports, kernel: str) -> None:
    assert reports[kernel, 90]["local_accesses"] == 0


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kernel", TOGETHER)
def test_batches_pass_the_gates_too(reports: Reports, kernel: str, arch: int) -> None:
    report = reports[kernel, arch]
    assert report["local_accesses"] == 0
    assert report["loads_128"] >= report["code_loads"] > 0
    assert report["registers"] <= 168


def test_a_page_stays_below_its_budget_on_hopper(reports: Reports) -> None:
    """The budget is 850 warp-instructions per 64 tokens of K and V for 8 queries. An H200's memory allows 1,100."""
    report = reports[DECODE, 90]
    assert report["loop_per_64_tokens"] <= 850
    assert report["local_accesses"] == 0
    assert report["int8_mma"] == 34
    assert report["loads_128"] == 8
    assert report["registers"] <= 168


def test_two_programs_that_read_rows_fit_on_a_multiprocessor(reports: Reports) -> None:
    report = reports[ROWS, 90]
    assert report["local_accesses"] == 0
    assert report["registers"] <= 128
    assert 2 * (report["shared_bytes"] + 1024) <= SHARED_KIB[80] << 10, "on an A100, which has least where two fit"


@pytest.mark.parametrize("kernel", TIGHTEST)
def test_the_largest_pages_fit_into_registers(reports: Reports, kernel: str) -> None:
    arch, products = TIGHTEST[kernel]
    report = reports[kernel, arch]
    assert report["local_accesses"] == 0
    assert report["int8_mma"] == products
    assert report["loads_128"] >= report["code_loads"] > 0


def test_a_run_goes_on_where_another_stopped_and_reads_again_what_has_changed(reports: Reports, tmp_path: Path) -> None:
    kernels = ["install D=64 Π=64 K2V2", "export D=64 Π=64 K2V2"]
    wrong = [reports[kernel, 90] | {"registers": 999} for kernel in kernels]
    wrong[1]["fingerprint"] = "that of another kernel"
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(report) + "\n" for report in wrong))
    found = {report["name"]: report for report in inspected(kernels, [90], "--results", str(results))}
    assert found == {kernels[0]: wrong[0], kernels[1]: reports[kernels[1], 90]}
    assert [json.loads(line) for line in results.read_text().splitlines()] == [*wrong, reports[kernels[1], 90]]
