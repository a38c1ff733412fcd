"""The router's configuration file."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, IPvAnyNetwork

from hackkv.config import Frozen, ListenConfig, RoleConfig
from hackkv.errors import ConfigError
from hackkv.types import Role

LEASE_TTL_S: Final = 3.0
"""Seconds that a node stays in the fleet without a report."""


MAX_WORKERS: Final = 64
TRACE_ID: Final = "{trace_id}"
TRACE_LINK: Final = r"^(https?://.*\{trace_id\}.*)?$"


class NodesConfig(Frozen):
    """Nodes that do not register themselves: control addresses (host:port) that the router polls."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class DeadlinesConfig(Frozen):
    """How long a request may stay in one state of `router.life.states`, in seconds.

    A request that stays longer goes to another decode node where the table of states says so; else it ends with a 504.
    """

    body_s: float = Field(default=30.0, gt=0)
    """Reading the request body; longer is a 408."""
    head_s: float = Field(default=10.0, gt=0)
    """From a connection's first moment, or a request's first byte, to the end of the request's headers."""
    idle_s: float = Field(default=100.0, gt=0)
    """Between two requests of a connection. Those who keep connections should close them first: httpx does after 5 s,
    nginx and AWS's load balancers after 60, Go after 90. If the server is first, a request on its way gets no answer.
    """
    write_s: float = Field(default=60.0, gt=0)
    """How long a client may leave an answer that is ready for it untouched."""
    tokenize_s: float = Field(default=60.0, gt=0)
    """Parsing and tokenizing a body, with the wait for a process if it is large."""
    grammar_s: float = Field(default=5.0, gt=0)
    """Compiling the grammar of one request; longer is a 400."""
    queue_s: float = Field(default=120.0, gt=0)
    """Waiting for a prefill node, and again for room on a decode node. Covers waits for nodes that restart."""
    prefill_s: float = Field(default=300.0, gt=0)
    """From dispatch to the first token."""
    offer_s: float = Field(default=10.0, gt=0)
    """Telling the prefill node which decode node holds room."""
    transfer_s: float = Field(default=60.0, gt=0)
    """From the first token (or the decode node's assignment) until the KV has landed."""
    transfer_ktoken_s: float = Field(default=1.0, ge=0)
    """Added to `transfer_s` for every thousand tokens of prompt and output."""
    landed_s: float = Field(default=120.0, gt=0)
    """From landing to the next new token: the decode node's queue, and the replay after a failover."""
    token_s: float = Field(default=60.0, gt=0)
    """Between two tokens, and from the last token to the end of the nodes' accounts."""
    swapped_s: float = Field(default=300.0, gt=0)
    """Waiting in the decode node's host memory."""
    total_s: float = Field(default=1800.0, gt=0)
    """The whole request."""


class LimitsConfig(Frozen):
    """Limits on what one client, and all clients together, may ask for."""

    max_body_bytes: int = Field(default=16 << 20, gt=0)
    max_buffered_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of bodies that wait to be parsed. One client may have half of them. A body beyond that is a 429."""
    parsers: int = Field(default=2, gt=0)
    """Large bodies that are parsed side by side, each in a process. One place is kept for bodies below 256 KiB."""
    max_parsing: int = Field(default=256, gt=0)
    """Large bodies that wait for a process, at most half of them from one client; one more is a 429."""
    max_connections: int = Field(default=8192, gt=0)
    """HTTP connections; one more is closed at once, unless another waits for its next request: that one is closed."""
    max_connections_per_address: int = Field(default=256, gt=0)
    """HTTP connections of one client address (IPv6: of one /64 network) to one process; one more is a 429, unless one
    of them waits for its next request: that one is closed. Addresses in `proxies` have no such limit."""
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
    """How long later requests may pass a request that finds no room."""
    max_passed: int = Field(default=16, ge=0)
    """How many requests may pass a request that finds no room."""
    max_failovers: int = Field(default=3, ge=0)
    """Lost nodes, failed transfers and missed deadlines that one request survives. Nodes that drain do not count."""

    def shared_by(self, processes: int) -> LimitsConfig:
        """The limits of one of `processes` processes, such that all of them together allow as much as these limits.

        Limits of one request, or of one address, stay as they are. One process takes a request of `max_sequences` if
        all of them together do. If these limits allow two large bodies at once, it reads at least two, so that a
        small one need not wait until a large one is read.
        """
        shared = ("max_buffered_bytes", "max_parsing", "max_connections", "max_inflight", "max_waiting")
        shares = {name: -(-getattr(self, name) // processes) for name in shared}
        for name in ("max_inflight", "max_waiting"):
            shares[name] = max(shares[name], min(getattr(self, name), self.max_sequences))
        return self.model_copy(update={**shares, "parsers": max(min(2, self.parsers), -(-self.parsers // processes))})


class ChatConfig(Frozen):
    """How the model's answers are read; by default as its chat template says."""

    tool_style: Literal["auto", "hermes", "llama3", "mistral", "pythonic", "none"] = "auto"
    """How the model writes calls of tools; none refuses tools."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """Whether answers may begin with thoughts in <think>."""


class RouterConfig(RoleConfig):
    """Everything the router process needs to know."""

    listen: ListenConfig = ListenConfig(port=8000)
    """The public HTTP API."""
    control: ListenConfig = ListenConfig(port=8001)
    """gRPC: nodes register and renew their leases here."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Processes that serve the HTTP API. With several, one more process leads them."""
    model: Path
    """Checkpoint folder; the router reads only its tokenizer, chat template and config.json."""
    served_model_name: str = ""
    """The name by which clients call the model; empty takes the folder's name."""
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    """One key a line. With no key at all the API is open."""
    strict: bool = False
    """Refuse every field of a request that would have no effect. Else hints are ignored, as docs/api.md lists them."""
    proxies: tuple[IPvAnyNetwork, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
    """Networks of reverse proxies: their connections are not counted by address, and their `X-Forwarded-For` is
    believed."""
    cors_origins: tuple[str, ...] = ()
    """Pages of other hosts that browsers may let call this API ("https://app.example"; "*" is any)."""
    trace_link: str = Field(default="", pattern=TRACE_LINK)
    """The address of a trace for the page, as "http://jaeger:16686/trace/{trace_id}"; empty shows ids without links."""
    nodes: NodesConfig = NodesConfig()
    prefix_dispatch: bool = True
    """Whether prompts prefer nodes that hold their beginning. Else only load decides."""
    lease_ttl_s: float = Field(default=LEASE_TTL_S, gt=0)
    shutdown_grace_s: float = Field(default=3.0, ge=0)
    """Time that requests in flight get to finish after SIGTERM."""
    chat: ChatConfig = ChatConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.resolve().name

    @property
    def static_nodes(self) -> tuple[tuple[Role, str], ...]:
        """Role and address of every node that the router polls."""
        listed = ((Role.PREFILL, self.nodes.prefill), (Role.DECODE, self.nodes.decode))
        return tuple((role, address) for role, addresses in listed for address in addresses)

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
