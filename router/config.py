"""The router's configuration file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hackkv.config import Frozen, ListenConfig, RoleConfig
from hackkv.errors import ConfigError


class NodesConfig(Frozen):
    """Nodes that do not register themselves: control addresses (host:port) that the router polls."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class DeadlinesConfig(Frozen):
    """How long a request may stay in one state of `router.states`, in seconds; longer is a 504."""

    body_s: float = Field(default=30.0, gt=0)
    """Reading the request body; longer is a 408."""
    queue_s: float = Field(default=120.0, gt=0)
    """Waiting for a prefill node, and again for room on a decode node; also while nodes restart."""
    prefill_s: float = Field(default=300.0, gt=0)
    """From dispatch to the first token."""
    offer_s: float = Field(default=10.0, gt=0)
    """Telling the prefill node which decode node holds room."""
    transfer_s: float = Field(default=60.0, gt=0)
    """From the first token (or the decode node's assignment) until the KV has landed; and on top of it"""
    transfer_ktoken_s: float = Field(default=1.0, ge=0)
    """for every thousand tokens of prompt and output."""
    landed_s: float = Field(default=120.0, gt=0)
    """From landing to the next new token: the decode node's queue, and the replay after a failover."""
    token_s: float = Field(default=60.0, gt=0)
    """Between two tokens."""
    swapped_s: float = Field(default=300.0, gt=0)
    """In the decode node's host memory."""
    total_s: float = Field(default=1800.0, gt=0)
    """The whole request."""


class LimitsConfig(Frozen):
    """What one client, and all of them together, may ask for."""

    max_body_bytes: int = Field(default=16 << 20, gt=0)
    max_prompt_tokens: int = Field(default=1 << 20, gt=0)
    """The fleet's own context length applies as well."""
    default_chat_tokens: int = Field(default=1024, gt=0)
    """`max_tokens` of a chat request that names none (cut to the context that is left); room is reserved for it."""
    max_sequences: int = Field(default=128, gt=0)
    """Prompts times `n` of one HTTP request."""
    max_inflight: int = Field(default=4096, gt=0)
    """Sequences inside the router; one more is a 429."""
    max_waiting: int = Field(default=1024, gt=0)
    """Sequences that wait for room on a decode node; one more is a 429."""
    ageing_s: float = Field(default=5.0, ge=0)
    """How long smaller requests may pass one that finds no room."""
    max_passed: int = Field(default=16, ge=0)
    """How many may."""
    max_failovers: int = Field(default=3, ge=0)
    """Lost nodes and failed transfers that one request survives; nodes that drain do not count."""


class RouterConfig(RoleConfig):
    """Everything the router process needs to know."""

    listen: ListenConfig = ListenConfig(port=8000)
    """The public HTTP API."""
    control: ListenConfig = ListenConfig(port=8001)
    """gRPC: nodes register and renew their leases here."""
    model: Path
    """Checkpoint folder; the router reads only its tokenizer, chat template and config.json."""
    served_model_name: str = ""
    """What clients call the model; empty takes the folder's name."""
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    """One key a line. With no key at all the API is open."""
    nodes: NodesConfig = NodesConfig()
    lease_ttl_s: float = Field(default=3.0, gt=0)
    shutdown_grace_s: float = Field(default=3.0, ge=0)
    """Time that requests in flight get to finish after SIGTERM."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.resolve().name

    def keys(self) -> tuple[str, ...]:
        """All API keys. Raises `ConfigError` if the key file cannot be read or holds none."""
        if self.api_key_file is None:
            return self.api_keys
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError(f"{self.api_key_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.api_key_file}: {error}") from error
        if not lines:
            raise ConfigError(f"{self.api_key_file}: holds no API key")
        return (*self.api_keys, *lines)
