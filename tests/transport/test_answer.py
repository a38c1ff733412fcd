"""A write that fails because its caller leaves is no fault of the server."""

from __future__ import annotations

from typing import cast

import grpc.aio
import pytest

from hackkv.errors import NodeLost
from transport.status import Context, answer


class GoneContext:
    """A call that ended during a write, as grpc.aio shows it."""

    async def write(self, data: bytes) -> None:
        """Fail as the core does."""
        raise grpc.aio.InternalError('Failed "execute_batch"')


async def test_a_caller_that_left_during_a_write_is_a_lost_node() -> None:
    with pytest.raises(NodeLost, match="went away"):
        await answer(cast(Context, GoneContext()), b"x")
