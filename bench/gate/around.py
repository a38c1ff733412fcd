"""What surrounds passes and steps in real nodes, measured on an idle cluster, and a specification that holds it.

`bench.durations` times passes and steps alone in a process: how they grow with their context is taken from it. A node
adds its event loop, the router its calls, a handoff its handshake; and processes compute more than passes and steps,
which takes cores from others on the same machine. All of that is measured with requests that the gate does not compare
later: one at a time, or one batch of equal ones.
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
"""Tokens of the shortest answer whose KV is handed off."""
LONG, LONG_REPEATS = 128, 5
"""Tokens of an answer beside which prompts are computed."""
BETWEEN = (CLIENT, ROUTER)
"""Processes that compute neither passes nor steps."""
LOOPBACK_GBIT_S = 20.0
NODE_HOST_GIB = 1.0
"""As nodes have by default (`host_bytes`)."""


class Around(Frozen):
    """Seconds, and factors, beside those of a profile."""

    request_s: float
    request_token_s: float
    call_s: float
    setup_s: float
    passes: tuple[float, ...]
    """How many times longer than the profile's, by its rows."""
    step: float
    """The same, of steps."""
    sequence_s: float = 0.0
    """Of a step, for each sequence but the first."""

    @classmethod
    def of(cls, alone: Profile, idle: Idle) -> Around:
        """What `idle` has beside `alone`, of one request at a time."""
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
        """A node of nothing but passes and steps."""
        return cls(
            request_s=0, request_token_s=0, call_s=0, setup_s=0, passes=(1.0,) * len(alone.prefill.rows), step=1.0
        )

    def profile(self, alone: Profile) -> Profile:
        """Durations in a node."""
        more = [(batch - 1) * self.sequence_s for batch in alone.decode.rows]
        return alone.model_copy(
            update={
                "prefill": _stretched(alone.prefill, self.passes, [0.0] * len(self.passes)),
                "decode": _stretched(alone.decode, [self.step] * len(more), more),
            }
        )


def _stretched(grid: Grid, factors: Sequence[float], more: Sequence[float]) -> Grid:
    """Each row of a grid times a number of its own, and seconds of its own more."""
    rows = zip(grid.seconds, factors, more, strict=True)
    seconds = tuple(tuple(old * factor + added for old in row) for row, factor, added in rows)
    return grid.model_copy(update={"seconds": seconds})


def _line(points: Sequence[tuple[int, Sequence[float]]]) -> tuple[float, float]:
    """Least squares through medians, neither end below 0: what nothing takes, and what each one more takes."""
    each, none = np.polyfit([at for at, _ in points], [median(values) for _, values in points], 1)
    return max(0.0, float(none)), max(0.0, float(each))


def host_of(idle: Idle, batches: Sequence[float], cores: float, footprint: Footprint) -> Host:
    """The machine: its cores, and what they compute for tokens and for KV beside passes and steps. `batches` are those
    of `idle.steps`.

    Router and client compute nothing but that: least squares share it out to requests, tokens of prompts, steps and
    tokens. Of nodes it is known for one request at a time, when passes and steps take turns: what they compute beyond
    them goes to requests, bytes and tokens. A request's own part is in the measured stages.
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
    """Least squares, none below 0: what one of each takes, where the first number of a row is what all others took."""
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
    """Measure what surrounds the passes and steps of `alone`, timed on this machine."""
    await cluster.send([cluster.call(0.0, SHORT, TOKENS)])  # warms up
    return Idle(
        passes=tuple([await _passes(cluster, round(row)) for row in alone.prefill.rows]),
        steps=tuple([await _steps(cluster, round(batch)) for batch in alone.decode.rows]),
        beside=await _beside(cluster, alone),
    )


def _each(cluster: Cluster, times: int, batch: int, tokens: int, prompt: int = SHORT) -> list[list[PlannedRequest]]:
    """So many batches of equal requests."""
    return [[cluster.call(0.0, prompt, tokens) for _ in range(batch)] for _ in range(times)]


async def _passes(cluster: Cluster, prompt: int) -> Phase:
    """A prompt's computation, one at a time, while its KV leaves."""
    return await cluster.timed(*_each(cluster, REPEATS, 1, HANDED_OFF, prompt))


async def _steps(cluster: Cluster, batch: int) -> Phase:
    """Steps of so many sequences, which come at once."""
    return await cluster.timed(*_each(cluster, max(3, 2 * REPEATS // batch), batch, TOKENS))


async def _beside(cluster: Cluster, alone: Profile) -> Phase:
    """The steps of one answer, and prompts whose passes take as long as those. They come when it has begun."""
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
    """The live cluster as the simulator sees it. `profile` holds `around.profile(...)`."""
    here = Instance(gpu="core", gpus=1, network_gbit_s=LOOPBACK_GBIT_S, host_gib=2 * NODE_HOST_GIB, usd_per_hour=0)
    core = Gpu(fp16_tflops=1, memory_gb=1, memory_gb_s=1, bus_gb_s=1)
    node = ReplicaPool(instance="here", replicas=1, profile=profile, host_gib=NODE_HOST_GIB)
    prefill = {
        "pages": pages[Role.PREFILL],
        "max_sequences": PrefillSettings().max_prompts,
        "chunk_tokens": PrefillSettings().chunk_tokens,
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
