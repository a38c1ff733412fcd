"""Small runs of `bench.soak` and `bench.fuzz` on one cluster of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import pytest
import pytest_asyncio
from rich.console import Console

from app.cluster import LocalCluster
from bench import disconnects, fuzz, fuzz_http, stages
from bench.cluster import tiny_cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.alone]

CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the checkpoint."""
    return tmp_path_factory.mktemp("soak") / "tiny"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(model: Path) -> AsyncIterator[LocalCluster]:
    """Router, one prefill and one decode process."""
    limit = fuzz_http.MAX_BODY_BYTES
    async with tiny_cluster(model, fuzz.CODEC, num_prefill=1, num_decode=1, max_body_bytes=limit) as cluster:
        yield cluster


async def test_stages_sum_to_the_clients_time(small: LocalCluster) -> None:
    """The sum is never more than the client's time, and near it most of the time.

    Without the right to real-time scheduling, a busy machine adds waits of its own.
    """
    timed = await stages.measure(small, 40, 4, seed=1, console=CONSOLE)
    finished = [one for one in timed if not one.kind.startswith("aborted")]
    assert len(timed) - len(finished) == 4
    assert all(0 < one.stages_s <= one.client_s for one in finished)
    assert stages.share_within(timed) >= 0.75
    assert median(abs(one.error_s) for one in timed) <= stages.ABSOLUTE_S


async def test_everything_comes_back_when_clients_leave(small: LocalCluster) -> None:
    result = await disconnects.storm(small, 80, 16, seed=2, console=CONSOLE)
    assert result.holds, result
    assert result.baseline_s is not None


async def test_hostile_input_ends_in_named_errors(small: LocalCluster, model: Path) -> None:
    result = await fuzz.attack(small, model, 2000, seed=3, console=CONSOLE)
    assert result.holds, result
    reasons = {name.partition(": ")[2] for name in result.frames if name.startswith("frame_refused")}
    assert reasons >= {"corrupt", "duplicate", "malformed", "order", "oversized", "range", "stale", "truncated"}
    assert result.pushes["frame_refused: corrupt"]
    assert result.bodies["400 request"]
    assert result.bodies["413 body_too_large"]
