"""The time around passes and steps in real nodes, measured on an idle cluster, and a specification that includes it.

`bench.durations` times passes and steps alone in a process, and shows how they grow with their context. A node adds its
event loop, the router its calls, a handoff its handshake. Processes also compute more than passes and steps, which
takes cores from others on the same machine. All of that is measured with requests that the gate does not compare later:
one at a time, or one batch of equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from bench import durations
from bench.gate.live import CLIENT, ROUTER, Cluster
from bench.gate.recording import Idle, Phase
from decode_node.config import DecodeSettings
from hackkv.config import Frozen
from hackkv.footprint import Footprint
from hackkv.timing import Stage
from hackkv.types import Role
from measure.serve.calls import PlannedRequest
from prefill_node.config import PrefillSettings
from sim.capacity import cost_of
from sim.catalogue import Catalogue, Gpu, Instance, ModelShape
from sim.costs import Grid, Profile
from sim.network_spec import NetworkSpec
from sim.sizes import sizes_of
from sim.spec import Codec, Efficiency, Host, ReplicaPool, Spec

REPEATS = 7
SHORT, TOKENS = 64, 32
"""Prompt and answer of a request whose steps are timed."""
HANDED_OFF = 2
"""Tokens of the shortest answer for which KV is handed off."""
LONG, LONG_REPEATS = 128, 5
"""Tokens of an answer beside which prompts are computed."""
BETWEEN = (CLIENT, ROUTER)
"""Processes that compute neither passes nor steps."""
LOOPBACK_GBIT_S = 20.0
NODE_HOST_GIB = 1.0
"""The default of nodes (`host_bytes`)."""


class Around(Frozen):
    """Seconds and factors that a node adds to a profile."""

    request_s: float
    request_token_s: float
    call_s: float
    setup_s: float
    passes: tuple[float, ...]
    """For each row of the profile, the factor by which passes take longer."""
    step: float
    """The factor by which steps take longer."""
    sequence_s: float = 0.0
    """Seconds that each sequence but the first adds to a step."""

    @classmethod
    def of(cls, alone: Profile, idle: Idle) -> Around:
        """What `idle` takes beyond `alone`, for one request at a time."""
        context, short = SHORT + TOKENS / 2, idle.steps[0].stages
        step_s = alone.decode.at(alone.decode.rows[0], context, "step")
        request_s, request_token_s = _line(
            [(phase.sizes[0][1], phase.stages[Stage.ROUTER_QUEUE]) for phase in idle.passes]
        )
        return cls(
            request_s=request_s,
            request_token_s=request_token_s,
            call_s=median(short[Stage.STREAM]),
            setup_s=median(short[Stage.TRANSFER]),
            passes=tuple(
                median(phase.stages[Stage.PREFILL]) / alone.prefill.at(row, 0, "pass")
                for row, phase in zip(alone.prefill.rows, idle.passes, strict=True)
            ),
            step=median(short[Stage.DECODE]) / (TOKENS - 1) / step_s,
        )

    @classmethod
    def nothing(cls, alone: Profile) -> Around:
        """No additions: a node of nothing but passes and steps."""
        return cls(
            request_s=0, request_token_s=0, call_s=0, setup_s=0, passes=(1.0,) * len(alone.prefill.rows), step=1.0
        )

    def profile(self, alone: Profile) -> Profile:
        """Durations in a node, from those of passes and steps alone."""
        more = [(batch - 1) * self.sequence_s for batch in alone.decode.rows]
        return alone.model_copy(
            update={
                "prefill": _stretched(alone.prefill, self.passes, [0.0] * len(self.passes)),
                "decode": _stretched(alone.decode, [self.step] * len(more), more),
            }
        )


def _stretched(grid: Grid, factors: Sequence[float], more: Sequence[float]) -> Grid:
    """A grid with each row multiplied by its factor and increased by its own seconds."""
    rows = zip(grid.seconds, factors, more, strict=True)
    seconds = tuple(tuple(old * factor + added for old in row) for row, factor, added in rows)
    return grid.model_copy(update={"seconds": seconds})


def _line(points: Sequence[tuple[int, Sequence[float]]]) -> tuple[float, float]:
    """Line through medians by least squares: (value at 0, slope), neither below 0."""
    each, none = np.polyfit([at for at, _ in points], [median(values) for _, values in points], 1)
    return max(0.0, float(none)), max(0.0, float(each))


def host_of(idle: Idle, batches: Sequence[float], cores: float, footprint: Footprint) -> Host:
    """The machine: its cores, and their work on tokens and KV beside passes and steps. `batches` are those of
    `idle.steps`.

    Router and client compute nothing else: least squares divide their time among requests, tokens of prompts, steps and
    tokens. For nodes, the extra time is known for one request at a time, when passes and steps take turns. It is
    divided among requests, bytes and tokens. The part of a request is already in the measured stages.
    """
    single = [(phase, 1.0) for phase in (*idle.passes, idle.steps[0])]
    between, nodes = [], []
    for phase, batch in (*single, *zip(idle.steps[1:], batches[1:], strict=True)):
        _, prompts, answers = (sum(part) for part in zip(*phase.sizes, strict=True))
        requests, tokens = len(phase.sizes), answers - len(phase.sizes)
        between.append((sum(phase.cpu_s[name] for name in BETWEEN), requests, prompts, tokens, tokens / batch))
    for phase, _ in single:
        kv_bytes = sum(footprint.wire_bytes(prompt) for _, prompt, _ in phase.sizes)
        computing_s = sum(phase.stages[Stage.PREFILL]) + sum(phase.stages[Stage.DECODE])
        beyond_s = sum(spent for name, spent in phase.cpu_s.items() if name not in BETWEEN) - computing_s
        nodes.append((beyond_s, len(phase.sizes), kv_bytes, sum(tokens for *_, tokens in phase.sizes)))
    *_, token_s, step_s = _shares(between)
    _, byte_s, _ = _shares(nodes)
    return Host(cores=cores, step_s=step_s, token_s=token_s, byte_s=byte_s)


def _shares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Least squares, clipped at 0: the cost of one of each kind. A row is (total cost, count of each kind)."""
    table = np.array(rows, dtype=float)
    return [max(0.0, float(share)) for share in np.linalg.lstsq(table[:, 1:], table[:, 0], rcond=None)[0]]


def gpus(codec: str) -> Profile:
    """Mistral-7B by roofline, prompts on four A10G and steps on an A100, on the grid of `bench.durations`."""
    tokens, batches, contexts = durations.TOKENS, durations.BATCHES, durations.CONTEXTS
    pool = ReplicaPool(instance="g5.12xlarge", replicas=1, tp=4)
    spec = Spec(
        model="mistral-7b",
        prefill=(pool,),
        decode=(ReplicaPool(instance="p4de.24xlarge", replicas=1),),
        codec=Codec(name=codec),
    )
    sizes = sizes_of(spec.codec, spec.shape.kv_shape)
    prefill, decode = cost_of(spec, pool, sizes), cost_of(spec, spec.decode[0], sizes)
    passes = tuple(tuple(prefill.prefill([(start, count)]).seconds for start in contexts) for count in tokens)
    steps = tuple(tuple(decode.decode(batch).seconds(batch * rows, 1) for rows in contexts) for batch in batches)
    return Profile(
        prefill=Grid(rows=tokens, columns=contexts, seconds=passes),
        decode=Grid(rows=batches, columns=contexts, seconds=steps),
    )


async def measure(cluster: Cluster, alone: Profile) -> Idle:
    """Measure the time around the passes and steps of `alone`, which were timed on this machine."""
    await cluster.send([cluster.call(0.0, SHORT, TOKENS)])  # warms up
    return Idle(
        passes=tuple([await _passes(cluster, round(row)) for row in alone.prefill.rows]),
        steps=tuple([await _steps(cluster, round(batch)) for batch in alone.decode.rows]),
        beside=await _beside(cluster, alone),
    )


def _each(cluster: Cluster, times: int, batch: int, tokens: int, prompt: int = SHORT) -> list[list[PlannedRequest]]:
    """`times` batches of `batch` equal requests."""
    return [[cluster.call(0.0, prompt, tokens) for _ in range(batch)] for _ in range(times)]


async def _passes(cluster: Cluster, prompt: int) -> Phase:
    """Compute prompts one at a time, while their KV leaves."""
    return await cluster.timed(*_each(cluster, REPEATS, 1, HANDED_OFF, prompt))


async def _steps(cluster: Cluster, batch: int) -> Phase:
    """Take steps of `batch` sequences, which come at once."""
    return await cluster.timed(*_each(cluster, max(3, 2 * REPEATS // batch), batch, TOKENS))


async def _beside(cluster: Cluster, alone: Profile) -> Phase:
    """Take the steps of one answer beside prompts whose passes take as long. The prompts come once it has begun."""
    prompt, steps_s = alone.prefill.rows[-1], LONG * alone.decode.at(1, SHORT + LONG / 2, "step")
    count = math.ceil(steps_s / alone.prefill.at(prompt, 0, "pass"))
    begun_s = 2 * alone.prefill.at(SHORT, 0, "pass")
    batches = [
        [cluster.call(0.0, SHORT, LONG), *(cluster.call(begun_s, round(prompt), 1) for _ in range(count))]
        for _ in range(LONG_REPEATS)
    ]
    return await cluster.timed(*batches)


def spec_of(
    model: ModelShape, codec: str, pages: dict[Role, int], profile: Path, around: Around, host: Host | None = None
) -> Spec:
    """The live cluster as the simulator sees it. `profile` is a file with `around.profile(...)`."""
    here = Instance(gpu="core", gpus=1, network_gbit_s=LOOPBACK_GBIT_S, host_gib=2 * NODE_HOST_GIB, usd_per_hour=0)
    core = Gpu(fp16_tflops=1, memory_gb=1, memory_gb_s=1, bus_gb_s=1)
    node = ReplicaPool(instance="here", replicas=1, profile=profile, host_gib=NODE_HOST_GIB)
    prefill = {
        "pages": pages[Role.PREFILL],
        "max_sequences": PrefillSettings().max_prompts,
        "chunk_tokens": PrefillSettings().chunk_tokens_on("cpu"),
        "efficiency": Efficiency(setup_s=around.setup_s),
    }
    decode = {
        "pages": pages[Role.DECODE],
        "max_sequences": DecodeSettings().max_sequences,
        "max_batch": DecodeSettings().max_batch,
    }
    return Spec(
        model=model,
        prefill=(node.model_copy(update=prefill),),
        decode=(node.model_copy(update=decode),),
        codec=Codec(name=codec),
        network=NetworkSpec(request_s=around.request_s, request_token_s=around.request_token_s, call_s=around.call_s),
        host=host,
        catalogue=Catalogue(gpus={"core": core}, instances={"here": here}),
    )
