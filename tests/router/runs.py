"""Runs one request over a scripted cluster and records the tokens of its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hackkv.timing import Stage, StageClock
from hackkv.types import Finish, Request, Sampling, Token
from router.config import DeadlinesConfig, LimitsConfig
from router.life.dispatch import Dispatcher
from router.life.flight import Flight
from router.life.states import RequestState
from router.watch.metrics import Metrics
from tests.router.scripted import Cluster, count_up

PROMPT = tuple(range(20))


def request(max_tokens: int = 5, seed: int = 3, prompt: tuple[int, ...] = PROMPT) -> Request:
    """A request, by default of two pages."""
    return Request("r", prompt, Sampling(seed=seed, max_tokens=max_tokens))


class Run:
    """A flight and the tokens that its client got."""

    def __init__(
        self,
        cluster: Cluster,
        max_tokens: int = 5,
        deadlines: DeadlinesConfig | None = None,
        max_failovers: int = 3,
        prompt: tuple[int, ...] = PROMPT,
    ) -> None:
        self.tokens: list[Token] = []
        self.enough: Callable[[Token], bool] = lambda token: False
        clock = StageClock(asyncio.get_running_loop().time)
        self.flight = Flight(request(max_tokens, prompt=prompt), clock, self._take)
        self.metrics = Metrics("tiny", cluster.fleet)
        limits = LimitsConfig(max_failovers=max_failovers)
        self.dispatcher = Dispatcher(cluster.fleet, self.metrics, deadlines or DeadlinesConfig(), limits)

    def _take(self, token: Token) -> bool:
        self.tokens.append(token)
        return not self.enough(token)

    async def serve(self) -> None:
        """See `Dispatcher.serve`."""
        await self.dispatcher.serve(self.flight)

    @property
    def ids(self) -> list[int]:
        """The token ids that the client got."""
        return [token.token_id for token in self.tokens]

    def assert_whole(self) -> None:
        """Assert that stages sum to the total. The clock is stopped first: it would go on between the two readings."""
        clock = self.flight.clock
        clock.stop()
        assert sum(clock.stages().values()) == pytest.approx(clock.total_s, rel=1e-9)

    def stages(self) -> dict[Stage, float]:
        """Stage -> seconds, for stages that took time."""
        return {stage: seconds for stage, seconds in self.flight.clock.stages().items() if seconds > 0}


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` is true. The timeout of the test ends a wait in vain."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def assert_served(run: Run, cluster: Cluster) -> None:
    """Assert that the client got the whole answer, each token once, and that everything is given back."""
    assert run.ids == count_up(run.flight.request)
    assert [token.index for token in run.tokens] == list(range(len(run.tokens)))
    assert run.tokens[-1].finish is Finish.LENGTH
    assert run.flight.life.state is RequestState.DONE
    cluster.assert_idle()


def counted(run: Run, name: str) -> dict[str, float]:
    """The series of a counter that are not 0, by their labels."""
    lines = (line for line in run.metrics.render().decode().splitlines() if line.startswith(f"{name}_total"))
    series = {labels: float(value) for labels, _, value in (line.rpartition(" ") for line in lines)}
    return {labels.removeprefix(f"{name}_total"): value for labels, value in series.items() if value}
