"""Mean job completion time on the paper's hardware, by formulas.

    prefill   [2 N n + alpha 2 n^2 (1 + cv^2) h d L / sigma] / (t F e_p) + all-reduces, divided by pipeline stages
    transfer  t_0 + n KV r / (e_n min(0.9 line, t 5 Gbit/s))
    decode    o [weights / (0.8 t HBM) + ctx u (a_M r + a_X / sigma)], and dequantizing o (d_0 + d_1 ctx u)
    wait      M/G/c (Allen-Cunneen) before c prefill replicas, which stay busy while they send

n and o are tokens of prompt and output, N parameters, t GPUs that share a layer, and u = L h d / t in multiples of that
of Llama-70B on 4 GPUs. The load is the rate at which the baseline keeps `rho` of its prefill replicas busy. sigma is 2
for HACK if INT8 products exist, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from hackkv.config import Frozen
from measure.serve.shapes import SHAPES, Shape, Spread
from sim.catalogue import FP16_BYTES, Gpu, Instance, ModelShape, named, shipped
from sim.paper.numbers import Case, numbers

RATIOS: Final = {"baseline": 1.0, "CacheGen": 0.14, "KVQuant": 0.14, "HACK": 0.164}
"""Bytes of KV as a share of FP16."""
FLOW_GBIT_S: Final = 5.0
LINE: Final = 0.9
HBM: Final = 0.8
QUANTIZE: Final = 0.02
"""Quantizing takes this share of HACK's prefill."""
APPROXIMATE: Final = 0.1
"""HACK's approximation takes this share of the time that dequantizing would."""
DATA: Final = {**SHAPES, "falcon-arxiv": Shape(Spread(1_800, 1_600, 2_000), Spread(243, 29, 464))}
"""Falcon reads arXiv cut to 2K tokens."""


class Parameters(Frozen):
    """The fitted parameters; the docstring of a field is its symbol in the formulas."""

    compute: float
    """e_p"""
    attention: float
    """alpha"""
    network: float
    """e_n"""
    setup_s: float
    """t_0"""
    memory_us: float
    """a_M, per row of context and step"""
    product_us: float
    """a_X"""
    dequantize_ms: float
    """d_0, per step"""
    dequantize_us: float
    """d_1"""
    kvquant: float
    """How much longer KVQuant dequantizes than CacheGen."""
    rho: float


@dataclass(frozen=True, slots=True)
class Setup:
    """A case with all values that the formulas need."""

    model: ModelShape
    gpu: Gpu
    instance: Instance
    tp: int
    pp: int
    replicas: int
    prompt: float
    output: float
    square: float
    """E[n^2] / E[n]^2 of prompts."""
    decode_tp: int
    decode_gpu: Gpu

    @property
    def unit(self) -> float:
        """The factor u of the formulas on the decode replica, relative to Llama-70B on 4 GPUs."""
        model = self.model
        return model.layers * model.heads * model.head_dim / self.decode_tp / (80 * 64 * 128 / 4)


@dataclass(frozen=True, slots=True)
class Parts:
    """Mean seconds of one request, by part."""

    prefill: float
    quantize: float
    wait: float
    transfer: float
    decode: float
    """Decoding without `approximate`."""
    approximate: float
    """Dequantizing, or HACK's approximation."""

    @property
    def jct(self) -> float:
        """Their sum."""
        return self.prefill + self.quantize + self.wait + self.transfer + self.decode + self.approximate


def setup_of(case: Case) -> Setup:
    """The paper's placement of a case."""
    return _setup(case.data, case.model, case.prefill)


@cache
def _setup(data: str, model_name: str, prefill: str) -> Setup:
    tables, paper = shipped(), numbers()
    model, instance = tables.models[model_name], tables.instances[prefill]
    tp, pp = paper.parallel[prefill][model_name]
    shape = named(DATA, data, "data")
    lengths = np.array(shape.prompt.draw(4_000, np.random.default_rng(0)), dtype=np.float64)
    decode = tables.instances[paper.decode]
    return Setup(
        model=model,
        gpu=tables.gpu_of(instance),
        instance=instance,
        tp=tp,
        pp=pp,
        replicas=max(1, paper.fleet[prefill] * instance.gpus // (tp * pp)),
        prompt=shape.prompt.mean,
        output=shape.output.mean,
        square=float(np.mean(lengths**2) / np.mean(lengths) ** 2),
        decode_tp=paper.parallel[paper.decode][model_name][0],
        decode_gpu=tables.gpu_of(decode),
    )


def prefill_s(at: Setup, method: str, p: Parameters) -> float:
    """Seconds to compute a prompt, without quantizing."""
    model, n = at.model, at.prompt
    sigma = 2.0 if method == "HACK" and at.gpu.int8_tops else 1.0
    flops = 2 * model.parameters * n + p.attention * model.attention_flops / 2 * n * n * at.square / sigma
    ring = 4 * model.layers * n * model.hidden * 2 * (at.tp - 1) / at.tp / (at.gpu.bus_gb_s * 1e9)
    return (flops / (at.tp * at.gpu.fp16_tflops * 1e12 * p.compute) + ring) / at.pp


def line_bytes_s(at: Setup, p: Parameters) -> float:
    """Bytes per second of one handoff."""
    line = LINE * at.instance.network_gbit_s * min(1.0, at.tp / at.instance.gpus)
    if at.instance.flow_gbit_s:
        line = min(line, at.tp * FLOW_GBIT_S)
    return p.network * line * 1e9 / 8


def transfer_s(at: Setup, method: str, p: Parameters) -> float:
    """Seconds of a handoff."""
    return p.setup_s + at.prompt * at.model.kv_bytes * RATIOS[method] / line_bytes_s(at, p)


def step_s(at: Setup, method: str, p: Parameters) -> tuple[float, float, float, float]:
    """Seconds of a decode step: (fixed, per row of context, what dequantizing adds to the first, to the second)."""
    weights = at.model.parameters * FP16_BYTES / (at.decode_tp * HBM * at.decode_gpu.memory_gb_s * 1e9)
    sigma = 2.0 if method == "HACK" else 1.0
    row = at.unit * (p.memory_us * RATIOS[method] + p.product_us / sigma) * 1e-6
    share = {"baseline": 0.0, "CacheGen": 1.0, "KVQuant": p.kvquant, "HACK": APPROXIMATE}[method]
    return weights, row, share * p.dequantize_ms * 1e-3, share * p.dequantize_us * 1e-6 * at.unit


def erlang_wait(load: float, servers: int) -> float:
    """Mean wait of M/M/c, in units of the service time, at `load` per server."""
    offered = load * servers
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    delayed = blocked / (1 - load * (1 - blocked))
    return delayed / (servers * (1 - load))


def arrival_rate(at: Setup, p: Parameters) -> float:
    """Requests per second at which the baseline keeps `rho` of its replicas busy."""
    return p.rho * at.replicas / (prefill_s(at, "baseline", p) + transfer_s(at, "baseline", p))


def parts_of(at: Setup, method: str, p: Parameters) -> Parts:
    """Mean seconds of a request, by part."""
    prefill, transfer = prefill_s(at, method, p), transfer_s(at, method, p)
    quantize = QUANTIZE * prefill if method == "HACK" else 0.0
    busy = prefill + quantize + transfer
    load = arrival_rate(at, p) * busy / at.replicas
    wait = at.square / 2 * erlang_wait(min(load, 0.999), at.replicas) * busy
    fixed, row, more_fixed, more_row = step_s(at, method, p)
    context = at.prompt + at.output / 2
    decode, more = at.output * (fixed + row * context), at.output * (more_fixed + more_row * context)
    return Parts(prefill, quantize, wait, transfer, decode, more)


def reductions(at: Setup, p: Parameters) -> tuple[float, float, float]:
    """JCT that HACK saves against baseline, CacheGen and KVQuant, in percent."""
    hack = parts_of(at, "HACK", p).jct
    base, cachegen, kvquant = (100 * (1 - hack / parts_of(at, other, p).jct) for other in RATIOS if other != "HACK")
    return base, cachegen, kvquant


def transfer_share(at: Setup, p: Parameters) -> float:
    """The transfer's share of the baseline's JCT, in percent."""
    parts = parts_of(at, "baseline", p)
    return 100 * parts.transfer / parts.jct
