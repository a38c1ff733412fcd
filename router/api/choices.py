"""From the tokens of one sequence to text: detokenized, and cut before a stop string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hackkv.logprobs import PromptLogprobs
from hackkv.tokenizer import Detokenizer, StopMatcher, Tokenizer
from hackkv.types import Finish, Token
from router.life.flight import Flight


@dataclass(slots=True)  # a frozen one takes longer to make, and there is one for each token
class Delta:
    """The part that one token adds to one choice. `token` is None if nobody asked for the token itself."""

    choice: ChoiceCollector
    text: str
    token: Token | None
    finish: Finish | None
    opening: bool
    """Whether this is the first of its choice."""

    def usage(self) -> dict[str, Any]:
        """Token counts of its choice up to here."""
        completion = 0 if self.token is None else self.token.index + 1
        return token_counts(len(self.choice.prompt_ids), completion, self.choice.cached_tokens)


def token_counts(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's `usage`. `cached` counts prompt tokens that were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _ignore(delta: Delta) -> None:
    """Do nothing."""


class ChoiceCollector:
    """One output: collects its text and tokens, and tells `on_delta` about each."""

    def __init__(
        self,
        index: int,
        prompt_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        wants_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        echoes: bool = False,
    ) -> None:
        """`shown` are special tokens that the text keeps. `echoes`: the answer begins with the prompt."""
        self.index, self.prompt_ids = index, prompt_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, shown)
        self._matcher = StopMatcher(stops)
        self._min_tokens, self._wants_tokens, self.echoes = min_tokens, wants_tokens, echoes
        self.pieces: list[str] = []
        """The text that each token added."""
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self.flight: Flight | None = None
        """The router's view of the sequence that this choice comes from."""
        self.on_delta: Callable[[Delta], None] = _ignore

    @property
    def text(self) -> str:
        """The text so far, without the prompt."""
        return "".join(self.pieces)

    @property
    def size(self) -> int:
        """Tokens that the choice's answer reports so far."""
        return len(self.tokens) + (len(self.prompt_ids) if self.echoes else 0)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    @property
    def prompt_logprobs(self) -> PromptLogprobs:
        """Log-probabilities of the prompt, if they were asked for."""
        prefilled = self.flight.route.prefilled if self.flight else None
        return prefilled.prompt_logprobs if prefilled else PromptLogprobs()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a prefill node had computed for an earlier request."""
        return self.flight.cached_tokens if self.flight else 0

    def take(self, token: Token) -> bool:
        """Add a token; False once the choice is complete."""
        if not self._wants_tokens:  # only the prompt is scored: the one computed token is not part of the answer
            self._show("", None, Finish.LENGTH)
            return False
        self.tokens.append(token)
        # As with OpenAI, the token that stopped the request is not part of the text.
        text = "" if token.finish is Finish.STOP else self._detokenizer.push(token.token_id)
        if token.finish is not None:
            text += self._detokenizer.flush()
        if token.index >= self._min_tokens:  # stop strings do not count within the first min_tokens
            text = self._matcher.push(text)
        finish = Finish.STOP if self._matcher.matched is not None else token.finish
        if finish is not None:
            text += self._matcher.release()
        self._show(text, token, finish)
        return finish is None

    def settle(self) -> None:
        """Drop what leads from the finished sequence back to here: a cycle, for the garbage collector to find."""
        self.flight, self.on_delta = None, _ignore

    def _show(self, text: str, token: Token | None, finish: Finish | None) -> None:
        opening = not self.pieces
        self.pieces.append(text)
        self.finish = finish
        self.on_delta(Delta(self, text, token, finish, opening))
