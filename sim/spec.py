"""A cluster to simulate, as data: `SPEC.yaml`, read into frozen models that refuse unknown keys."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from faults.plan import FaultPlan
from hackkv.config import Frozen, load
from hackkv.defaults import DEFAULT_CODEC
from hackkv.errors import ConfigError
from router.config import LimitsConfig
from sim.catalogue import Catalogue, Gpu, Instance, ModelShape, named, shipped
from sim.network_spec import NetworkSpec

GIB = 1 << 30
CODECS_FILE: Final = Path(__file__).with_name("codecs.yaml")
_LIMITS = LimitsConfig()


class Efficiency(Frozen):
    """Shares of the rated speeds that an engine reaches. The defaults are a good engine's."""

    compute: float = Field(default=0.5, gt=0, le=1)
    """Share of FP16 FLOP/s, in prefill."""
    attention: float = Field(default=1.5, ge=1)
    """How many times slower a FLOP of attention is than one of a matrix product."""
    memory: float = Field(default=0.8, gt=0, le=1)
    """Share of the memory's rate, in decode."""
    network: float = Field(default=0.85, gt=0, le=1)
    """Share of min(line, flows x their limit)."""
    bus: float = Field(default=1.0, gt=0, le=1)
    """Share of the rate between GPUs."""
    pass_s: float = Field(default=0.002, ge=0)
    """Fixed seconds of a prefill pass."""
    step_s: float = Field(default=0.001, ge=0)
    """Fixed seconds of a decode step."""
    all_reduce_s: float = Field(default=10e-6, ge=0)
    """Latency of one all-reduce; a layer has two."""
    setup_s: float = Field(default=0.005, ge=0)
    """Fixed seconds of a handoff: handshake and receipt."""


class Scale(Frozen):
    """How a pool follows its load (`sim.scaling`). The load of prefill replicas is seconds of queued work. That of
    decode replicas is the share of their pages in use, and 1 while requests wait for room."""

    least: int = Field(default=1, ge=0)
    """Replicas of the pool that always run, at each router. One replica of the role always runs."""
    up_at: float = Field(gt=0)
    """A load above this value starts replicas."""
    down_at: float = Field(ge=0)
    """A load below this value stops replicas, one after another."""
    start_s: float = Field(default=60.0, ge=0)
    """Seconds until a started replica takes requests: its process starts and loads weights."""
    down_after_s: float = Field(default=900.0, ge=0)
    """Seconds for which the load has to be low before the first replica stops."""

    @model_validator(mode="after")
    def _is_band(self) -> Self:
        if self.down_at >= self.up_at:
            raise ValueError(f"down_at {self.down_at:g} is not below up_at {self.up_at:g}")
        return self

    @property
    def band(self) -> tuple[float, float, float]:
        """What concerns the load; a role has one load, so its pools agree on it."""
        return self.up_at, self.down_at, self.down_after_s


class ReplicaPool(Frozen):
    """Replicas of one role."""

    instance: str
    replicas: int = Field(gt=0, le=100_000)
    scale: Scale | None = None
    """Starts and stops replicas, at most `replicas` of them; None runs all of them all the time."""
    tp: int = Field(default=1, gt=0)
    """GPUs that share each layer."""
    pp: int = Field(default=1, gt=0)
    """Pipeline stages."""
    pages: int = Field(default=0, ge=0)
    """Size of the page pool; 0 takes what memory leaves beside weights and `reserve`."""
    reserve: float = Field(default=0.1, ge=0, lt=1)
    """Share of the memory for activations."""
    host_gib: float | None = Field(default=None, ge=0)
    """Host memory for KV; by default half of the instance's, shared by its replicas."""
    max_sequences: int = Field(default=256, gt=0)
    """Prompts under way (prefill), or requests that hold room (decode)."""
    max_batch: int = Field(default=128, gt=0)
    chunk_tokens: int = Field(default=8192, gt=0)
    replay_tokens: int = Field(default=256, gt=0)
    profile: Path | None = None
    """Measured durations (`sim.costs.Profiled`) instead of the roofline."""
    efficiency: Efficiency | None = None
    """Replaces the specification's efficiency for this pool."""

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.tp * self.pp


class Host(Frozen):
    """One machine on whose cores all processes compute (`sim.host`): replicas with a thread each, router and clients.
    Durations are those of a process that is alone on it. Every step is an event of its own then."""

    cores: float = Field(gt=0)
    """Threads that compute at full speed side by side."""
    step_s: float = Field(default=0.0, ge=0)
    """Fixed seconds of a core for each step, to send its tokens to clients."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds of a core for each of these tokens, in addition."""
    byte_s: float = Field(default=0.0, ge=0)
    """Seconds of a core for each byte of KV, at each end of the wire, in addition to passes."""


def _in_a_row(pools: object) -> object:
    """Make a tuple of pools: none for None, one for a single pool."""
    if pools is None:
        return ()
    return pools if isinstance(pools, list | tuple) else (pools,)


Pools = Annotated[tuple[ReplicaPool, ...], BeforeValidator(_in_a_row)]


class Policy(Frozen):
    """The router's settings that affect decisions, with the router's defaults."""

    ageing_s: float = Field(default=_LIMITS.ageing_s, ge=0)
    max_passed: int = Field(default=_LIMITS.max_passed, ge=0)
    shards: int = Field(default=1, gt=0)
    """Routers; each owns an equal part of all replicas and of all requests."""
    max_failovers: int = Field(default=_LIMITS.max_failovers, ge=0)


class Codec(Frozen):
    """A codec of `hackkv.codecs.CODECS` with its settings, and what it costs to compute."""

    name: str = DEFAULT_CODEC
    settings: dict[str, int | float | str | bool] = Field(default_factory=dict)
    dequantizes: bool = False
    """A step makes FP16 of the KV before it attends, as for codecs that the kernels cannot multiply."""

    @property
    def label(self) -> str:
        """The codec in words, for tables."""
        return f"{self.name}, dequantized" if self.dequantizes else self.name


class CodecList(Frozen):
    """A file of codecs."""

    codecs: tuple[Codec, ...]


@cache
def shipped_codecs() -> tuple[Codec, ...]:
    """The codecs among which a plan chooses if its specification names none."""
    return load(CodecList, CODECS_FILE).codecs


class Objective(Frozen):
    """A request is good if it keeps all limits, in milliseconds."""

    ttft: float | None = Field(default=None, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    e2el: float | None = Field(default=None, gt=0)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by metric."""
        return {name: limit for name, limit in self.model_dump().items() if limit is not None}


class Load(Frozen):
    """Synthetic requests."""

    shape: str = "humaneval"
    """A data set of HACK's Table 4 (`measure.serve.shapes.SHAPES`)."""
    input_len: int = Field(default=0, ge=0)
    """Fixed prompt length instead of the shape."""
    output_len: int = Field(default=64, gt=0)
    """Fixed output length, with `input_len`."""
    rate: float = Field(default=1.0, gt=0)
    """Requests per second."""
    ramp_to: float = Field(default=0.0, ge=0)
    """The rate at the last request; it changes linearly up to there. 0 keeps the rate constant."""
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma distribution of gaps; 1 is Poisson."""
    requests: int = Field(default=1000, gt=0, le=100_000_000)
    concurrency: int = Field(default=0, ge=0)
    """Clients of a closed loop; each sends its next request when its answer is complete. 0 is an open loop."""


class Choices(Frozen):
    """The options among which `hackkv plan` chooses."""

    prefill: tuple[str, ...] = ()
    """Names of instances; empty takes those of the specification's own pools."""
    decode: tuple[str, ...] = ()
    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 4)
    codecs: tuple[Codec, ...] = Field(default_factory=shipped_codecs)
    """The most exact first: of codecs that cost the same, the first wins. The default is `sim/codecs.yaml`."""
    aggregated: bool = True
    """Whether replicas that compute prompts and decode are tried too."""
    available: dict[str, int] = Field(default_factory=dict)
    """Instances of each kind that can be had; a kind that is not named has no limit."""
    cells: int = Field(default=1, gt=0)
    """Equal parts of the load, each served by a cluster of its own. The plan is for one of them."""


class Spec(Frozen):
    """Everything about a simulated cluster."""

    model: str | ModelShape
    prefill: Pools = ()
    """One pool, or a list: a role may have several kinds of replicas. Without any pool, every decode replica computes
    prompts too (aggregated)."""
    decode: Pools = Field(min_length=1)
    codec: Codec = Codec()
    network: NetworkSpec = NetworkSpec()
    host: Host | None = None
    """Set if the whole cluster shares one machine. Then seconds of `network` and of handoffs are work on its cores."""
    efficiency: Efficiency = Efficiency()
    policy: Policy = Policy()
    slo: Objective = Objective()
    load: Load = Load()
    faults: FaultPlan = FaultPlan()
    plan: Choices = Choices()
    noise: float = Field(default=0.0, ge=0, le=2)
    """Sigma of the lognormal noise on every duration."""
    catalogue: Catalogue = Catalogue()
    """Rows in addition to the shipped ones, or in place of them."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        parts = [sum(pool.replicas for pool in pools) for pools in self.roles.values()]
        if self.policy.shards > min(parts):
            raise ValueError(f"policy.shards is {self.policy.shards}, but a role has {min(parts)} replicas")
        if self.host is not None and self.policy.shards > 1:
            raise ValueError(f"policy.shards is {self.policy.shards}, but routers that share a host are not simulated")
        for role, pools in self.roles.items():
            bands = {pool.scale.band for pool in pools if pool.scale}
            if len(bands) > 1:
                raise ValueError(
                    f"{role}: kinds that scale differ in up_at, down_at or down_after_s; they share a load"
                )
        return self

    @property
    def roles(self) -> dict[str, tuple[ReplicaPool, ...]]:
        """Role -> its pools; only roles that have any."""
        return {"prefill": self.prefill, "decode": self.decode} if self.prefill else {"decode": self.decode}

    @property
    def pools(self) -> tuple[ReplicaPool, ...]:
        """The pools of both roles, prefill first."""
        return self.prefill + self.decode

    @property
    def tables(self) -> Catalogue:
        """The shipped catalogue and the specification's own rows."""
        return shipped().with_more(self.catalogue)

    @property
    def shape(self) -> ModelShape:
        """The model. Raises `ConfigError` for an unknown name."""
        return self.model if isinstance(self.model, ModelShape) else named(self.tables.models, self.model, "model")

    def instance_of(self, pool: ReplicaPool) -> Instance:
        """The pool's machine. Raises `ConfigError` for an unknown name."""
        return named(self.tables.instances, pool.instance, f"{self.role_of(pool)}.instance")

    def role_of(self, pool: ReplicaPool) -> str:
        """See `key_of`; for a pool that is in several places, the first."""
        for role, pools in self.roles.items():
            for index, one in enumerate(pools):
                if one is pool:
                    return self.key_of(role, index)
        return "decode"

    def key_of(self, role: str, index: int) -> str:
        """The key of a role's pool in the specification: the role, and the index if the role has several pools."""
        return role if len(self.roles[role]) == 1 else f"{role}.{index}"

    def gpu_of(self, pool: ReplicaPool) -> Gpu:
        """The pool's GPU. Raises `ConfigError` for an unknown name."""
        return self.tables.gpu_of(self.instance_of(pool))

    def efficiency_of(self, pool: ReplicaPool) -> Efficiency:
        """The pool's own efficiency, or else the specification's."""
        return pool.efficiency or self.efficiency

    def usd_per_hour(self) -> float:
        """Price of all replicas per hour; each pays for the share of an instance that it uses."""
        return sum(pool.replicas * self.usd_of(pool) for pool in self.pools)

    def usd_of(self, pool: ReplicaPool) -> float:
        """Price of one replica per hour."""
        instance = self.instance_of(pool)
        return instance.usd_per_hour * pool.gpus / instance.gpus


def read_spec(path: Path) -> Spec:
    """Read a specification. Raises `ConfigError` naming file and key, and what the key was probably meant to be."""
    spec = load(Spec, path)
    try:
        _ = spec.shape
        for pool in spec.pools:
            spec.gpu_of(pool)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return spec
