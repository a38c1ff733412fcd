"""The names of one sequence's pages, as far as its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence

from hackkv.page_names import Naming, PageName
from hackkv.types import Request


class SequenceNames:
    """Page names of a sequence. With each full page of chosen tokens there is one more."""

    def __init__(self, naming: Naming, request: Request, *, grows: bool) -> None:
        """With `grows` False only the prompt's pages get names: pages from decode have other bytes than prefill's."""
        self._naming, self._salt, self._grows = naming, request.cache_salt, grows
        self._names = list(naming.names(request.prompt_ids, request.cache_salt))
        self._rest = list(request.prompt_ids[len(self._names) * naming.page_tokens :])

    @property
    def prompt(self) -> Sequence[PageName]:
        """The names of the prompt's full pages, before any token is chosen."""
        return self._names

    def chosen(self, ids: Sequence[int]) -> None:
        """Append chosen tokens."""
        if not self._grows:
            return
        self._rest += ids
        full = len(self._rest) // self._naming.page_tokens * self._naming.page_tokens
        if full:
            last = self._names[-1] if self._names else None
            self._names += self._naming.names(self._rest[:full], self._salt, last)
            del self._rest[:full]

    def of(self, rows: int) -> Sequence[PageName]:
        """The names of the full pages of the first `rows` rows."""
        return self._names[: rows // self._naming.page_tokens]
