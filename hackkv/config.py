"""Configuration: one YAML file per role, read into frozen models that refuse unknown keys.

Configuration stops at each role's `__main__`; constructors further down take plain values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hackkv.defaults import DEFAULT_CODEC, DEFAULT_MAX_KL
from hackkv.errors import ConfigError
from hackkv.spelling import did_you_mean


class Frozen(BaseModel):
    """A configuration section: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TlsConfig(Frozen):
    """Mutual TLS between the processes of a cluster; all files are PEM."""

    authority: Path
    """Certificate of the authority that signed the certificates of all processes."""
    certificate: Path
    key: Path
    server_name: str = ""
    """The name that peers' certificates carry, if it differs from the host that is dialled."""


class InternalConfig(Frozen):
    """Access to the internal ports (control calls and KV). All processes of a cluster need the same settings."""

    token_file: Path | None = None
    """A secret that every call must show."""
    tls: TlsConfig | None = None
    open: bool = False
    """Let a port that other machines can reach open without token and TLS."""


class TracesConfig(Frozen):
    """OpenTelemetry: where spans of requests are sent."""

    endpoint: str = ""
    """Address of a collector that takes OTLP over HTTP (http://collector:4318/v1/traces). Empty takes the environment's
    OTEL_EXPORTER_OTLP_ENDPOINT; with neither nothing is traced."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers sent with every batch, such as a collector's key."""
    sample: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that is traced. Where the client has decided already (`traceparent`), that counts."""


class RoleConfig(Frozen):
    """The settings with which every role's configuration begins."""

    node_id: str = ""
    """A stable name of this process; empty takes role and address."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or a JSON object a line, with the ids of the request and its trace."""
    traces: TracesConfig = TracesConfig()
    internal: InternalConfig = InternalConfig()


class CodecConfig(Frozen):
    """The codec that keeps the KV cache: a preset of `hackkv.codecs.CODECS`, and settings that override it."""

    name: str = DEFAULT_CODEC
    settings: dict[str, int | float | str | bool] = Field(default_factory=dict)
    max_kl: float = Field(default=DEFAULT_MAX_KL, gt=0)
    """A node refuses to serve with a codec that costs its model more than this (`hackkv.nodes.CodecLoss.kl`)."""
    allow_loss: bool = False
    """Serve all the same with a codec that costs more than `max_kl`."""


class ModelConfig(Frozen):
    """The checkpoint that a worker serves, and how the worker computes."""

    path: str = ""
    """Folder of a Hugging Face checkpoint or a hub name; empty serves the model that ships with hackkv."""
    dtype: str = "bfloat16"
    """The type in which products are computed: bfloat16 or float32."""
    weights: str = "auto"
    """How matrices rest: auto, fp32, bf16 (numbers), int8 or int4 (codes). int8 and int4 keep what a GGUF file has as
    Q8_0, Q4_0 or Q4_1 of no more bits, and pack every other matrix. auto keeps that too and packs nothing else; in
    FP32, and on a GPU, it takes numbers."""
    max_context: int = Field(default=0, ge=0)
    """Longest prompt plus output in tokens; 0 takes the checkpoint's own limit."""
    threads: int = Field(default=0, ge=0)
    """Compute threads of this process; 0 leaves the choice to torch."""
    batch_invariant: bool | None = None
    """Whether a row of a result never depends on the rows beside it, bit for bit: greedy answers are the same in any
    batch. It costs the library's faster products of many rows; null means only in float32."""
    backend: str = "auto"
    device: str = "auto"
    """The device of the model and its KV: cpu, cuda (a GPU), cuda:N or auto, which takes a GPU that can run the backend
    if there is one. On a machine with several GPUs, `hackkv serve` gives each node one."""


class ListenConfig(Frozen):
    """The address at which a service listens. It is explicit: nothing binds to all interfaces by default."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 lets the system choose; the chosen port is printed and registered."""
    advertise_host: str | None = None
    """The name that peers dial; needed when `host` is a wildcard."""


ConfigT = TypeVar("ConfigT", bound=Frozen)


def load(cls: type[ConfigT], path: Path | None, overrides: dict[str, Any] | None = None) -> ConfigT:
    """Read `path` (if any), apply `overrides` (dotted keys, flags win over the file), and validate.

    Raises `ConfigError` that names the file and the key.
    """
    where = str(path) if path else "flags"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date such as 2026-13-01
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(data).__name__}")
    for key, value in (overrides or {}).items():
        _set_dotted(data, key, value, where)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = first["msg"]
        if first["type"] == "extra_forbidden":
            *section, name = map(str, first["loc"])
            what = "there is no such setting" + did_you_mean(name, _settings(cls, section), ".".join(section))
        raise ConfigError(f"{where}: {key}: {what}") from error


def _settings(cls: type[BaseModel], section: Sequence[str]) -> Collection[str]:
    """Names of the settings of a section, which may be optional."""
    for name in section:
        if name in cls.model_fields:  # else it is an index into a list
            sections = list(_sections(cls.model_fields[name].annotation))
            if not sections:
                return ()
            cls = sections[0]
    return cls.model_fields


def _sections(hint: object) -> Iterator[type[BaseModel]]:
    """The sections within a type: the type itself, or those of an optional type or a list."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _sections(part)


def _set_dotted(data: dict[str, Any], key: str, value: object, where: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {key}: {parent} is not a section")
    data[leaf] = value
