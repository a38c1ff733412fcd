"""A whole simulated cluster: conservation, determinism, macro-steps, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.plan import FaultPlan
from hackkv.codecs import CODECS
from hackkv.errors import ConfigError
from sim.cluster import Cluster, Options, SimulationOutcome
from sim.eventlog import EventKind
from sim.jobs import Arrival
from sim.network_spec import LinkSharing, NetworkSpec, Sending
from sim.shards import simulate as simulate_shards
from sim.spec import Codec, Load, ReplicaPool, Spec
from sim.summary import summarize
from sim.workload import synthetic
from tests.kinds import in_a_cluster
from tests.sim.clusters import run, small, stages, tight


def simulate(spec: Spec, seed: int = 0, **options: Any) -> SimulationOutcome:
    return run(spec, synthetic(spec.load, seed), **options)


def check_books(outcome: SimulationOutcome) -> None:
    """Check that nothing is held and nothing was lost."""
    rows, spec = outcome.rows, outcome.spec
    assert rows.filled == len(rows.table)
    for replica in outcome.decodes:
        assert replica.pool.free_pages == replica.pool.num_pages
        assert not replica.scheduler.seats
        assert replica.scheduler.host_bytes == 0
    for prefill in outcome.prefills:
        assert not prefill.shipments
        assert prefill.queued_tokens == 0
    assert not any(link.flows for link in outcome.links)
    np.testing.assert_allclose(stages(rows), rows["e2el_s"], rtol=1e-12, atol=1e-12)
    if rows.ok.all() and not spec.faults.rules:
        assert sum(replica.tally.tokens for replica in outcome.decodes) == rows["output_length"].sum() - len(rows.ok)
        assert sum(each.tally.tokens + each.tally.cached_tokens for each in outcome.prefills) == (
            rows["input_length"].sum()
        )
        assert outcome.network.bytes == pytest.approx(rows["wire_bytes"].sum())


@pytest.mark.parametrize("codec", in_a_cluster(CODECS))
def test_every_codec_is_served_and_everything_is_given_back(codec: str) -> None:
    outcome = simulate(small(codec=Codec(name=codec)))
    assert outcome.rows.ok.all()
    check_books(outcome)


@pytest.mark.parametrize("sharing", list(LinkSharing))
@pytest.mark.parametrize("sending", list(Sending))
@pytest.mark.parametrize("blocking", [False, True])
def test_every_network(sharing: LinkSharing, sending: Sending, blocking: bool) -> None:
    network = NetworkSpec(sharing=sharing, sending=sending, blocking=blocking, link_gbit_s=5, receiver_gbit_s=8)
    check_books(simulate(small(network=network)))


def test_the_wire_carries_what_the_codec_says() -> None:
    outcome = simulate(small(load=Load(input_len=640, output_len=4, requests=5)))
    size = Cluster(outcome.spec).sizes.footprint.wire_bytes(640)
    assert list(outcome.rows["wire_bytes"]) == [size] * 5


@pytest.mark.parametrize("chunk", [256, 8192])
def test_rows_that_a_codec_evicts_are_neither_sent_nor_held(chunk: int) -> None:
    """A quarter of each prompt stays: that much is sent when the prompt is complete, and is held while decoding."""
    prefill = ReplicaPool(instance="g5.12xlarge", replicas=2, tp=4, chunk_tokens=chunk)
    load = Load(input_len=6400, output_len=40, requests=20, rate=2.0)
    codecs = (Codec(name="snapkv", settings={"budget": "25%", "of": "rot-k4v4"}), Codec(name="rot-k4v4"))
    evicting, whole = (simulate(small(prefill=prefill, codec=codec, load=load)) for codec in codecs)
    check_books(evicting)
    sizes = Cluster(evicting.spec).sizes
    assert sizes.rows_held(6400) == 1600
    assert list(evicting.rows["wire_bytes"]) == [sizes.footprint.wire_bytes(1600)] * 20
    assert evicting.rows["decode_s"].sum() < whole.rows["decode_s"].sum()
    peaks = [sum(each.tally.peak_pages for each in outcome.decodes) for outcome in (evicting, whole)]
    assert peaks[0] < 0.3 * peaks[1]


def test_the_router_and_its_calls_take_their_time() -> None:
    load = Load(input_len=640, output_len=4, requests=5, rate=0.01)
    slow, fast = (
        simulate(small(load=load, network=NetworkSpec(request_s=request_s, call_s=call_s)))
        for request_s, call_s in ((0.5, 0.25), (0.0, 0.0))
    )
    check_books(slow)
    assert list(slow.rows["router_queue_s"]) == pytest.approx([0.5] * 5)
    assert list(slow.rows["stream_s"]) == pytest.approx([0.25] * 5)
    np.testing.assert_allclose(slow.rows["ttft_s"] - fast.rows["ttft_s"], 0.75)


def test_short_pages_swap_and_everybody_ends() -> None:
    outcome = simulate(tight(pages=40))
    assert outcome.log.counts[EventKind.SWAP_OUT] > 0
    assert outcome.rows.ok.all()
    check_books(outcome)


@pytest.mark.parametrize("spec", [small(), tight(pages=40), tight(pages=70), tight(pages=400)])
def test_macro_steps_equal_single_steps(spec: Spec) -> None:
    whole, single = simulate(spec, macro=True), simulate(spec, macro=False)
    assert whole.log.counts[EventKind.STEP] < single.log.counts[EventKind.STEP]
    np.testing.assert_allclose(whole.rows.table, single.rows.table, rtol=1e-9, atol=1e-9)


@given(
    pages=st.integers(12, 200),
    batch=st.integers(1, 20),
    sizes=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500), st.integers(1, 150)), min_size=1, max_size=25),
)
@settings(max_examples=40)
def test_macro_steps_equal_single_steps_for_any_load(
    pages: int, batch: int, sizes: list[tuple[float, int, int]]
) -> None:
    decode = ReplicaPool(
        instance="p4de.24xlarge", replicas=2, pages=pages, max_batch=batch, max_sequences=24, host_gib=16
    )
    spec = small(decode=decode)
    arrivals = sorted((Arrival(*size) for size in sizes), key=lambda arrival: arrival.at_s)
    whole, single = run(spec, arrivals, macro=True), run(spec, arrivals, macro=False)
    np.testing.assert_allclose(whole.rows.table, single.rows.table, rtol=1e-9, atol=1e-9)
    check_books(whole)


def test_equal_seeds_give_equal_logs_and_others_do_not() -> None:
    spec = small(noise=0.2)
    first, again, other = simulate(spec, 1), simulate(spec, 1), simulate(spec, 2)
    assert first.log.hexdigest == again.log.hexdigest != other.log.hexdigest
    np.testing.assert_array_equal(first.rows.table, again.rows.table)


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    spec = small(load=Load(shape="humaneval", requests=60, concurrency=3))
    outcome = simulate(spec)
    check_books(outcome)
    began, ended = outcome.rows["at_s"], outcome.rows["at_s"] + outcome.rows["e2el_s"]
    under_way = [int(np.sum((began <= moment) & (ended > moment))) for moment in began]
    assert max(under_way) == 3


def test_routers_share_the_fleet() -> None:
    from_spec = small(prefills=4, decodes=4, policy={"shards": 2})
    outcome = simulate(from_spec)
    check_books(outcome)
    assert all(replica.tally.tokens for replica in outcome.decodes)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_routers_one_by_one_give_what_they_give_together(processes: int) -> None:
    """A router shares nothing with others, so its requests have the same outcome alone."""
    spec = small(prefills=3, decodes=4, policy={"shards": 3}, noise=0.2, load=Load(shape="humaneval", requests=61))
    arrivals = synthetic(spec.load, 0)
    together, apart = run(spec, arrivals), simulate_shards(spec, arrivals, Options(), processes)
    np.testing.assert_array_equal(apart.rows.table, together.rows.table)
    assert apart.rows.filled == 61
    assert apart.counts == together.log.counts
    assert apart.events == simulate_shards(spec, arrivals, Options()).events
    ours, theirs = summarize(apart), summarize(together.record)
    assert {**ours, "events": ""} == {**theirs, "events": ""}


def test_equal_blocks_are_computed_and_sent_once() -> None:
    """A second turn goes to the replica with the first turn's pages, unless others have that much less to do."""
    blocks = tuple(range(8))
    arrivals = [Arrival(100.0 * number, 4096 + 100, 4, 0, blocks) for number in range(3)]
    outcome = run(small(), arrivals)
    assert list(outcome.rows["cached_tokens"]) == [0, 4096, 4096]
    assert outcome.rows["ttft_s"][1] < outcome.rows["ttft_s"][0]
    first, second, third = outcome.rows["wire_bytes"]
    footprint = Cluster(outcome.spec).sizes.footprint
    assert second == third == first - 4096 // footprint.page_tokens * footprint.wire_page_bytes
    check_books(outcome)


@given(
    pages=st.integers(80, 200),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 80), st.floats(0, 4)), max_size=25),
)
@settings(max_examples=25)
def test_macro_steps_equal_single_steps_for_any_conversations(
    pages: int, turns: list[tuple[int, int, int, float]]
) -> None:
    """Each conversation repeats its first blocks. Pages run short, so known pages are given up and swapped."""
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=2, pages=pages, max_batch=6, max_sequences=24, host_gib=16)
    arrivals = [
        Arrival(at_s, 512 * blocks + 70, output, 0, tuple(100 * talk + index for index in range(blocks)))
        for talk, blocks, output, at_s in sorted(turns, key=lambda turn: turn[3])
    ]
    spec = small(decode=decode)
    whole, single = run(spec, arrivals, macro=True), run(spec, arrivals, macro=False)
    np.testing.assert_allclose(whole.rows.table, single.rows.table, rtol=1e-9, atol=1e-9)
    check_books(whole)


def test_a_request_that_fits_nowhere_fails_alone() -> None:
    spec = small(decode=ReplicaPool(instance="p4de.24xlarge", replicas=1, pages=20))
    outcome = run(spec, [Arrival(0, 64, 4), Arrival(1, 64 * 30, 4), Arrival(2, 64, 4)])
    assert list(outcome.rows.ok) == [True, False, True]
    assert "pages" in outcome.rows.errors[1]


KILLS = [
    {"at": "decode.token", "do": "kill", "node": "decode-0", "nth": 300, "seconds": 2},
    {"at": "decode.landed", "do": "kill", "node": "decode-1", "nth": 5, "seconds": 1},
    {"at": "prefill.first_token", "do": "kill", "node": "prefill-0", "nth": 4, "seconds": 3},
    {"at": "prefill.job", "do": "kill", "node": "prefill-1", "nth": 7, "seconds": 3},
]


@pytest.mark.parametrize("rule", KILLS, ids=lambda rule: str(rule["at"]))
def test_killed_nodes_cost_time_and_no_request(rule: dict[str, object]) -> None:
    plan = FaultPlan.model_validate({"rules": [rule]})
    outcome, whole = simulate(small(faults=plan)), simulate(small())
    assert outcome.log.counts[EventKind.DOWN] == 1
    assert outcome.log.counts[EventKind.UP] == 1
    assert outcome.rows["failovers"].sum() > 0
    assert outcome.rows.ok.all()
    assert outcome.rows["e2el_s"].sum() > whole.rows["e2el_s"].sum()
    check_books(outcome)


def test_a_slow_sender() -> None:
    rule = {"at": "wire.frame", "do": "slow", "node": "prefill-0", "bytes_per_s": 2e8, "times": 0}
    slow = simulate(small(faults=FaultPlan.model_validate({"rules": [rule]})))
    assert slow.rows["transfer_s"].sum() > simulate(small()).rows["transfer_s"].sum()


def test_a_fault_that_is_not_simulated_is_named() -> None:
    plan = FaultPlan.model_validate({"rules": [{"at": "wire.frame", "do": "corrupt"}]})
    with pytest.raises(ConfigError, match=r"faults\.rules\.0: corrupt at wire\.frame is not simulated"):
        Cluster(small(faults=plan))


def test_weights_that_do_not_fit_are_refused() -> None:
    spec = small(model="llama-70b", decode=ReplicaPool(instance="p4de.24xlarge", replicas=1, tp=1))
    with pytest.raises(ConfigError, match="no room for KV: weights take 141 GB"):
        simulate(spec)


@pytest.mark.parametrize("chunk", [256, 8192])
def test_replicas_that_do_both(chunk: int) -> None:
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=3, chunk_tokens=chunk)
    spec = small(prefill=None, decode=decode, load=Load(shape="humaneval", rate=20.0, requests=150))
    whole, single = simulate(spec), simulate(spec, macro=False)
    assert whole.rows.ok.all()
    assert whole.rows["wire_bytes"].sum() == 0
    assert whole.rows["transfer_s"].sum() == 0
    np.testing.assert_allclose(whole.rows.table, single.rows.table, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stages(whole.rows), whole.rows["e2el_s"], rtol=1e-12)
    assert all(replica.pool.free_pages == replica.pool.num_pages for replica in whole.decodes)
