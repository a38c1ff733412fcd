"""Flows share links fairly, and every byte arrives."""

from __future__ import annotations

import pytest
from hack_kernels.window import OWN_PAGE_ONLY
from hypothesis import given
from hypothesis import strategies as st

from hackkv.footprint import Footprint
from sim.network import Flow, Network, SharedLink, fair_rates
from sim.network_spec import LinkSharing
from sim.world import World

FLOWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0.1, 10), st.floats(0.1, 100), st.floats(0, 20)),
    min_size=1,
    max_size=12,
)  # sender, receiver, limit, bytes, start


def new_world() -> World:
    return World(Footprint(64, 1, 1, 1, OWN_PAGE_ONLY), 1)


@given(FLOWS, st.lists(st.floats(0.5, 5), min_size=8, max_size=8))
def test_rates_are_max_min_fair(plan: list[tuple[int, int, float, float, float]], rates: list[float]) -> None:
    links = [SharedLink(str(index), rate) for index, rate in enumerate(rates)]
    flows = [Flow((links[a], links[4 + b]), limit, lambda: None) for a, b, limit, _, _ in plan]
    given_rates = fair_rates(flows)
    load = {link.name: sum(rate for flow, rate in given_rates.items() if link in flow.links) for link in links}
    for link in links:
        assert load[link.name] <= link.rate * (1 + 1e-9)
    for flow, rate in given_rates.items():
        assert rate > 0
        if rate < flow.limit * (1 - 1e-9):  # so a link on its path is full, and no flow there has more
            full = [link for link in flow.links if load[link.name] >= link.rate * (1 - 1e-9)]
            assert any(
                rate >= max(other for one, other in given_rates.items() if link in one.links) * (1 - 1e-9)
                for link in full
            )


@pytest.mark.parametrize("sharing", list(LinkSharing))
@given(plan=FLOWS)
def test_every_byte_arrives(sharing: LinkSharing, plan: list[tuple[int, int, float, float, float]]) -> None:
    world = new_world()
    network, links = Network(world, sharing), [SharedLink(str(index), 1.5) for index in range(8)]
    done: list[int] = []

    def begin(number: int, flow: Flow, size: float) -> None:
        began = world.now
        least = size / min(flow.limit, 1.5)

        def ended() -> None:
            done.append(number)
            assert world.now - began >= least * (1 - 1e-9)

        flow.on_done = ended
        network.start(flow, size)

    for number, (a, b, limit, size, at) in enumerate(plan):
        flow = Flow((links[a], links[4 + b]), limit, lambda: None)
        world.after(at, lambda number=number, flow=flow, size=size: begin(number, flow, size))  # type: ignore[misc]
    world.run()
    assert sorted(done) == list(range(len(plan)))
    assert network.bytes == pytest.approx(sum(size for *_, size, _ in plan))
    assert not any(link.flows for link in links)


def test_two_flows_halve_a_line_and_the_rest_speeds_up() -> None:
    world, ends = new_world(), list[float]()
    network, line = Network(world, LinkSharing.FAIR), SharedLink("line", 10.0)
    for size in (10.0, 30.0):
        network.start(Flow((line,), 100.0, lambda: ends.append(world.now)), size)
    world.run()
    assert ends == pytest.approx([2.0, 4.0])


def test_first_in_first_out_serves_one_after_another() -> None:
    world, ends = new_world(), list[float]()
    network, line = Network(world, LinkSharing.FIFO), SharedLink("line", 10.0)
    for size in (10.0, 30.0):
        network.start(Flow((line,), 100.0, lambda: ends.append(world.now)), size)
    world.run()
    assert ends == pytest.approx([1.0, 4.0])


def test_the_slower_of_receivers_line_and_processing_decides() -> None:
    world, ends = new_world(), list[float]()
    network = Network(world, LinkSharing.FAIR)
    receiver, processing = SharedLink("receiver", 10.0), SharedLink("processing", 4.0)
    for number in range(2):
        flow = Flow((SharedLink(f"sender {number}", 10.0), receiver, processing), 100.0, lambda: ends.append(world.now))
        network.start(flow, 8.0)
    world.run()
    assert ends == pytest.approx([4.0, 4.0])


def test_a_cancelled_flow_leaves_its_share() -> None:
    world, ends = new_world(), list[float]()
    network, line = Network(world, LinkSharing.FAIR), SharedLink("line", 10.0)
    gone = Flow((line,), 100.0, lambda: ends.append(-1.0))
    network.start(gone, 100.0)
    network.start(Flow((line,), 100.0, lambda: ends.append(world.now)), 10.0)
    world.after(1.0, lambda: network.cancel(gone))
    world.run()
    assert ends == pytest.approx([1.5])
