"""A job of a prefill node, as its passes see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hackkv.framing import FrameWriter
from hackkv.guide import Guide
from hackkv.logprobs import PromptLogprobs
from hackkv.types import PrefillJob, Token
from hackkv.wire_form import RAW, WireForm


@dataclass(slots=True, eq=False)
class Work:
    """A job, and its state from pass to pass."""

    job: PrefillJob
    queued_at: float
    form: WireForm = RAW
    """The wire form of its frames."""
    guide: Guide | None = None
    """Set if the request has a grammar."""
    writer: FrameWriter = field(init=False)
    started_at: float | None = None
    finished_at: float = 0.0
    """When token 0 was chosen (perf_counter)."""
    sent_pages: dict[int, int] = field(default_factory=dict)
    """Pages that have left or that the decode node held, by layer; a repeated pass does not send them again."""
    quantize_s: float = 0.0
    wire_encode_s: float = 0.0
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)

    def __post_init__(self) -> None:
        self.writer = FrameWriter(self.job.transfer_id, self.job.epoch, self.form)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0 of a prompt, which is complete."""

    work: Work
    token: Token
