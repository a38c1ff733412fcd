"""What surrounds passes and steps in real nodes, measured on an idle cluster, and a specification that holds it.

`bench.durations` times passes and steps alone in a process: how they grow with their context is taken from it. A node
adds its event loop, the router its calls, a handoff its handshake; and where both roles share a machine, each takes
longer beside the other. All of that is measured with requests that the gate does not compare later: one at a time, or
one batch of equal ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench import durations
from bench.gate.live import Cluster, Subject
from decode_node.config import DecodeSettings
from hackkv.config import Frozen
from hackkv.model.config import read_spec as read_model
from hackkv.timing import Stage
from hackkv.types import Role
from measure.serve.client import Outcome
from prefill_node.config import PrefillSettings
from sim.catalogue import Catalogue, Gpu, Instance, Model
from sim.cluster import cost_of
from sim.costs import Grid, Profile
from sim.sizes import sizes_of
from sim.spec import Codec, Efficiency, Network, Pool, Spec

REPEATS = 7
SHORT, TOKENS = 64, 32
"""Prompt and answer of a request whose steps are timed."""
HANDED_OFF = 2
"""Tokens of the shortest answer whose KV is handed off."""
BESIDE_BATCH, BESIDE_PROMPT, BESIDE_TOKENS = 4, 256, 256
LOOPBACK_GBIT_S = 20.0
NODE_HOST_GIB = 1.0
"""As nodes have by default (`host_bytes`)."""


class Around(Frozen):
    """Seconds, and factors, beside those of a profile."""

    request_s: float
    call_s: float
    setup_s: float
    passes: tuple[float, ...]
    """How many times longer than the profile's, by its rows."""
    steps: tuple[float, ...]
    prefill_beside: float
    """How many times longer a pass takes beside steps."""
    decode_beside: float

    @classmethod
    def nothing(cls, alone: Profile) -> Around:
        """A node of nothing but passes and steps."""
        passes, steps = ((1.0,) * len(grid.rows) for grid in (alone.prefill, alone.decode))
        return cls(request_s=0, call_s=0, setup_s=0, passes=passes, steps=steps, prefill_beside=1.0, decode_beside=1.0)

    def profile(self, alone: Profile) -> Profile:
        """Durations in a node."""
        return alone.model_copy(
            update={"prefill": _times(alone.prefill, self.passes), "decode": _times(alone.decode, self.steps)}
        )


def _times(grid: Grid, by_row: Sequence[float]) -> Grid:
    """Each row of a grid times a number of its own."""
    rows = zip(grid.seconds, by_row, strict=True)
    return grid.model_copy(update={"seconds": tuple(tuple(old * factor for old in row) for row, factor in rows)})


def gpus(codec: str) -> Profile:
    """Mistral-7B by roofline, prompts on four A10G and steps on an A100, on the grid of `bench.durations`."""
    tokens, batches, contexts = durations.TOKENS, durations.BATCHES, durations.CONTEXTS
    pool = Pool(instance="g5.12xlarge", replicas=1, tp=4)
    spec = Spec(
        model="mistral-7b", prefill=pool, decode=Pool(instance="p4de.24xlarge", replicas=1), codec=Codec(name=codec)
    )
    sizes = sizes_of(spec.codec, spec.shape.kv_shape)
    prefill, decode = cost_of(spec, pool, sizes), cost_of(spec, spec.decode, sizes)
    passes = tuple(tuple(prefill.prefill([(start, count)]).seconds for start in contexts) for count in tokens)
    steps = tuple(tuple(decode.decode(batch).seconds(batch * rows, 1) for rows in contexts) for batch in batches)
    return Profile(
        prefill=Grid(rows=tokens, columns=contexts, seconds=passes),
        decode=Grid(rows=batches, columns=contexts, seconds=steps),
    )


async def measure(cluster: Cluster, alone: Profile) -> Around:
    """Measure what `alone`, timed on this machine, lacks."""
    await _one(cluster, SHORT, TOKENS)  # warms up
    rows = alone.prefill.rows
    passes = [await _passes(cluster, round(row)) for row in rows]
    steps = [await _steps(cluster, round(batch)) for batch in alone.decode.rows]
    beside_s = await _passes(cluster, BESIDE_PROMPT), await _steps(cluster, BESIDE_BATCH)
    answers = [await _one(cluster, SHORT, TOKENS) for _ in range(2 * REPEATS)]
    context = SHORT + TOKENS / 2
    return Around(
        request_s=_stage(answers, Stage.ROUTER_QUEUE),
        call_s=_stage(answers, Stage.STREAM),
        setup_s=_stage(answers, Stage.TRANSFER),
        passes=tuple(took / alone.prefill.at(row, 0, "pass") for row, took in zip(rows, passes, strict=True)),
        steps=tuple(
            took / alone.decode.at(batch, context, "step") for batch, took in zip(alone.decode.rows, steps, strict=True)
        ),
        prefill_beside=max(1.0, await _passes_beside_steps(cluster) / beside_s[0]),
        decode_beside=max(1.0, await _steps_beside_passes(cluster) / beside_s[1]),
    )


async def _one(cluster: Cluster, prompt: int, tokens: int) -> Outcome:
    return (await cluster.send([cluster.call(0.0, prompt, tokens)]))[0]


def _stage(answers: Sequence[Outcome], stage: Stage) -> float:
    """Its median, in seconds."""
    return float(median(answer.report["stages"][stage] for answer in answers if answer.report is not None))


async def _passes(cluster: Cluster, prompt: int) -> float:
    """Seconds of a prompt's computation, one at a time, while its KV leaves."""
    return _stage([await _one(cluster, prompt, HANDED_OFF) for _ in range(REPEATS)], Stage.PREFILL)


async def _steps(cluster: Cluster, batch: int) -> float:
    """Seconds of a step of so many sequences, which come at once."""
    answers: list[Outcome] = []
    for _ in range(REPEATS):
        answers += await cluster.send([cluster.call(0.0, SHORT, TOKENS) for _ in range(batch)])
    return _stage(answers, Stage.DECODE) / (TOKENS - 1)


async def _steps_beside_passes(cluster: Cluster) -> float:
    """`_steps` while one prompt after another is computed."""
    timing = asyncio.create_task(_steps(cluster, BESIDE_BATCH))
    try:
        while not timing.done():
            await _one(cluster, BESIDE_PROMPT, HANDED_OFF)
    finally:
        timing.cancel()
        await asyncio.wait([timing])
    return timing.result()


async def _passes_beside_steps(cluster: Cluster) -> float:
    """`_passes` while a batch decodes."""
    batch = [cluster.call(0.0, SHORT, BESIDE_TOKENS) for _ in range(BESIDE_BATCH)]
    decoding = asyncio.create_task(cluster.send(batch))
    answers: list[Outcome] = []
    try:
        await _one(cluster, SHORT, 1)  # stands in line behind the batch's prompts
        while (not decoding.done() and len(answers) < 2 * REPEATS) or not answers:
            answers.append(await _one(cluster, BESIDE_PROMPT, HANDED_OFF))
        await decoding
    finally:
        decoding.cancel()
        await asyncio.wait([decoding])
    return _stage(answers, Stage.PREFILL)


def spec_of(subject: Subject, pages: dict[Role, int], profile: Path, around: Around) -> Spec:
    """The live cluster as the simulator sees it. `profile` holds `around.profile(...)`."""
    here = Instance(gpu="core", gpus=1, network_gbit_s=LOOPBACK_GBIT_S, host_gib=2 * NODE_HOST_GIB, usd_per_hour=0)
    core = Gpu(fp16_tflops=1, memory_gb=1, memory_gb_s=1, bus_gb_s=1)
    node = Pool(instance="here", replicas=1, profile=profile, host_gib=NODE_HOST_GIB)
    prefill = {
        "pages": pages[Role.PREFILL],
        "max_sequences": PrefillSettings().max_prompts,
        "chunk_tokens": PrefillSettings().chunk_tokens,
        "efficiency": Efficiency(setup_s=around.setup_s, beside=around.prefill_beside),
    }
    decode = {
        "pages": pages[Role.DECODE],
        "max_sequences": DecodeSettings().max_sequences,
        "max_batch": DecodeSettings().max_batch,
        "efficiency": Efficiency(beside=around.decode_beside),
    }
    return Spec(
        model=_shape(subject.folder),
        prefill=node.model_copy(update=prefill),
        decode=node.model_copy(update=decode),
        codec=Codec(name=subject.codec),
        network=Network(request_s=around.request_s, call_s=around.call_s),
        catalogue=Catalogue(gpus={"core": core}, instances={"here": here}),
    )


def _shape(folder: Path) -> Model:
    model = read_model(folder)
    wide = model.hidden * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return Model(
        layers=model.num_layers,
        hidden=model.hidden,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        parameters_b=(model.num_layers * (wide + 3 * model.hidden * model.ffn) + model.vocab * model.hidden) / 1e9,
    )
