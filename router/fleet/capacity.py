"""The largest request that the fleet can serve. Nodes that are away for a while count: they may only be restarting."""

from __future__ import annotations

from hackkv.types import Role
from router.fleet.roster import Roster, unavailable
from transport.base import DecodeNode, PrefillNode


class Capacity:
    """The limits of one request."""

    def __init__(self, prefill: Roster[PrefillNode], decode: Roster[DecodeNode]) -> None:
        self._prefill, self._decode = prefill, decode

    @property
    def known(self) -> bool:
        """Whether every role was filled since the router started, so that the limits below are known."""
        return not self._unknown

    @property
    def max_context(self) -> int:
        """Longest prompt plus output, in tokens, that every node can serve. Raises `Unavailable` before it is known."""
        prefill, decode = self._prefill.known(), self._decode.known()
        if not prefill or not decode:
            raise unavailable(*self._unknown)
        return min(info.max_context for info in (*prefill, *decode))

    @property
    def max_request_tokens(self) -> int:
        """Tokens of KV that fit on the largest decode node when it is empty."""
        return max((info.total_pages * info.page_tokens for info in self._decode.known()), default=0)

    @property
    def _unknown(self) -> list[Role]:
        return [roster.role for roster in (self._prefill, self._decode) if not roster.known()]
