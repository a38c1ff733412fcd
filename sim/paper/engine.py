"""The paper's formulas as a cost model, so that the simulator can run its clusters; and the times of a good engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.catalogue import shipped
from sim.cluster import Cluster
from sim.costs import LinearStep, PassCost, Roofline
from sim.jobs import Arrival
from sim.network_spec import NetworkSpec
from sim.paper.model import DATA, QUANTIZE, RATIOS, Parameters, Setup, arrival_rate, line_bytes_s, prefill_s, step_s
from sim.paper.numbers import Case, numbers
from sim.sizes import sizes_of
from sim.spec import Codec, Efficiency, ReplicaPool, Spec

CODECS = {"baseline": "fp16", "CacheGen": "hack", "KVQuant": "hack", "HACK": "hack"}
"""Method -> the codec whose pages the simulator counts. The wire carries the paper's ratios."""
_PAGES = 40_000


@dataclass(frozen=True, slots=True)
class PaperCost:
    """Durations of the formulas. A prompt's cost follows the mean square of the lengths. The step time of a sequence
    does not depend on the other sequences, as in the formulas."""

    at: Setup
    method: str
    p: Parameters

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """The formula's time, shared out by the FLOPs of these chunks."""
        whole = prefill_s(self.at, self.method, self.p)
        linear, square = self._split(whole)
        seconds = sum(
            count / self.at.prompt * linear
            + ((start + count) ** 2 - start**2) / (self.at.prompt**2 * self.at.square) * square
            for start, count in chunks
        )
        quantize = QUANTIZE * seconds if self.method == "HACK" else 0.0
        return PassCost(seconds + quantize, quantize)

    def _split(self, whole: float) -> tuple[float, float]:
        """The part of `whole` that grows with the length, and the part that grows with its square."""
        without = prefill_s(self.at, self.method, self.p.model_copy(update={"attention": 0.0}))
        return without, whole - without

    def decode(self, batch: int) -> LinearStep:
        """The formula's time of one sequence, at the mean context of the batch."""
        fixed, row, more_fixed, more_row = step_s(self.at, self.method, self.p)
        return LinearStep(batch, fixed + more_fixed, (row + more_row) / batch, more_row / batch)

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """0: no node fails here."""
        return 0.0

    def swap(self, num_bytes: int) -> float:
        """0: pages never run short here."""
        return 0.0


def simulated_jct(case: Case, at: Setup, method: str, p: Parameters, requests: int, seed: int) -> float:
    """Mean JCT in seconds in the simulator: the paper's fleet and load, and transfers that block their replica."""
    decode_count = 4
    instance, decode = shipped().instances[case.prefill], numbers().decode
    whole = line_bytes_s(at, p)
    # Pages have the codec's size. The line is scaled so that a handoff takes as long as the paper's bytes would.
    sizes = sizes_of(Codec(name=CODECS[method]), at.model.kv_shape)
    scale = sizes.resting_ratio / RATIOS[method]
    rated = instance.network_gbit_s * min(1.0, at.tp / instance.gpus) * 1e9 / 8
    if instance.flow_gbit_s:
        rated = min(rated, at.tp * instance.flow_gbit_s * 1e9 / 8)
    network = min(1.0, whole * scale / rated)
    sender = Efficiency(network=network, setup_s=p.setup_s)
    pool = ReplicaPool(
        instance=case.prefill,
        replicas=at.replicas,
        tp=at.tp,
        pp=at.pp,
        pages=_PAGES,
        host_gib=1000,
        chunk_tokens=1 << 20,
        max_sequences=1,
        efficiency=sender,
    )
    room = ReplicaPool(
        instance=decode, replicas=decode_count, tp=at.decode_tp, pages=_PAGES, host_gib=1000, max_batch=512
    )
    spec = Spec(
        model=case.model,
        prefill=(pool,),
        decode=(room.model_copy(update={"max_sequences": 512, "efficiency": Efficiency(network=1.0)}),),
        codec=Codec(name=CODECS[method]),
        network=NetworkSpec.model_validate({"sharing": "independent", "sending": "after", "blocking": True}),
    )
    rows = Cluster(spec, costs=lambda *_: PaperCost(at, method, p)).run(_arrivals(case, at, p, requests, seed)).rows
    return float(np.mean(rows["e2el_s"][requests // 10 :]))


def _arrivals(case: Case, at: Setup, p: Parameters, requests: int, seed: int) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    shape = DATA[case.data]
    times = np.cumsum(rng.exponential(1 / arrival_rate(at, p), requests))
    prompts, outputs = shape.prompt.draw(requests, rng), shape.output.draw(requests, rng)
    return [Arrival(float(at_s), n, o) for at_s, n, o in zip(times, prompts, outputs, strict=True)]


def good_engine(at: Setup, codec: Codec, batch: int) -> tuple[float, float, float]:
    """Seconds of prefill, transfer and decode on the same hardware, without queues: the roofline's defaults."""
    sizes, good = sizes_of(codec, at.model.kv_shape), Efficiency()
    prompt, output = round(at.prompt), round(at.output)
    prefill = Roofline(at.model, at.gpu, good, sizes, at.tp, at.pp).prefill([(0, prompt)])
    decode = Roofline(at.model, at.decode_gpu, good, sizes, at.decode_tp, 1).decode(batch)
    line = at.instance.network_gbit_s * min(1.0, at.tp / at.instance.gpus)
    if at.instance.flow_gbit_s:
        line = min(line, at.tp * at.instance.flow_gbit_s)
    transfer = good.setup_s + sizes.footprint.wire_bytes(prompt) / (good.network * line * 1e9 / 8)
    steps = decode.seconds(batch * prompt, output - 1)
    return prefill.seconds, transfer, steps
