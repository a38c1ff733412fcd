"""Every error that crosses a room, on one page.

HackkvError
├── ConfigError              a configuration file, flag or checkpoint is wrong; raised before any port opens
│   ├── CalibrationMismatch  a calibration file is of another model than the one to be served
│   └── CheckpointError      the model folder: missing file, unknown architecture, wrong shape
├── RequestError             the client's request is wrong (HTTP 400)
├── SequenceError            one sequence of a batch cannot go on; `span` says which
│   ├── NonFiniteError       a model produced NaN or Inf, or a value beyond FP16 (HTTP 500)
│   └── GuideError           a grammar leaves no token, or costs too much (HTTP 400)
├── Overloaded               no capacity now; retry later (HTTP 429)
├── Unavailable              no node of a role is alive (HTTP 503)
├── DeadlineExceeded         a state outlived its deadline (HTTP 504)
├── Cancelled                the client left (HTTP 499)
├── Unauthorized             a call to an internal port lacks the cluster's token (HTTP 502)
├── NodeLost                 a peer process or connection died (HTTP 502, retried first)
│   └── NodeDraining         a node that was asked to stop hands over a request, which is sound
└── TransferError            a handoff failed (HTTP 502, retried first)
    ├── HandshakeRefused     fingerprints differ, or the transfer is unknown or stale; names the field
    └── FrameRefused         a frame is corrupt, truncated, out of order, duplicated, stale or oversized

`code` is stable and travels on the wire; `hackkv.errors.by_code` turns it back into a class.
"""

from __future__ import annotations


class HackkvError(Exception):
    """Base of all errors that this project raises on purpose."""

    code = "internal"


class ConfigError(HackkvError):
    """A configuration value is unknown, malformed or contradictory; the message names it."""

    code = "config"


class CalibrationMismatch(ConfigError):
    """A calibration file is of another model than the one to be served; the message names the file."""

    code = "calibration"


class CheckpointError(ConfigError):
    """A model folder cannot be served; the message names the file, tensor or field."""

    code = "checkpoint"


class RequestError(HackkvError):
    """The client's request cannot be served as written. `param` names the field at fault."""

    code = "request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SequenceError(HackkvError):
    """One sequence of a batch cannot go on, the one with index `span`. The others have not advanced."""

    code = "sequence"

    def __init__(self, message: str, span: int = 0) -> None:
        super().__init__(message)
        self.span = span


class NonFiniteError(SequenceError):
    """K or V of one sequence holds NaN, Inf or a magnitude beyond FP16; the message says where."""

    code = "non_finite"


class GuideError(SequenceError):
    """The grammar of one sequence leaves no token, or finding the next ones would take too long."""

    code = "guide"


class Overloaded(HackkvError):
    """There is no room now. `retry_after_s` is the measured time until there may be."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(HackkvError):
    """No live node can serve the request."""

    code = "unavailable"


class DeadlineExceeded(HackkvError):
    """A request stayed in one state longer than that state allows."""

    code = "deadline"


class Cancelled(HackkvError):
    """The request was cancelled before it finished."""

    code = "cancelled"


class Unauthorized(HackkvError):
    """A call to an internal port did not show the cluster's token."""

    code = "unauthorized"


class NodeLost(HackkvError):
    """A node stopped answering."""

    code = "node_lost"


class NodeDraining(NodeLost):
    """A node that is about to stop hands this request over: another node goes on with it."""

    code = "node_draining"


class TransferError(HackkvError):
    """A handoff did not complete; nothing of it was committed."""

    code = "transfer"


class HandshakeRefused(TransferError):
    """The receiver refused a handoff before any KV moved."""

    code = "handshake_refused"


class FrameRefused(TransferError):
    """The receiver refused a frame; `reason` is one word fit for a metric label."""

    code = "frame_refused"

    def __init__(self, message: str, reason: str = "corrupt") -> None:
        super().__init__(message)
        self.reason = reason


def _descendants(cls: type[HackkvError]) -> list[type[HackkvError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _descendants(child))]


def by_code(code: str, message: str) -> HackkvError:
    """Rebuild an error that a peer reported as (code, message); an unknown code becomes the base class."""
    for cls in _descendants(HackkvError):
        if cls.code == code:
            return cls(message)
    return HackkvError(message)
