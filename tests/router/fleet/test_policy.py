"""Properties of the choice of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.health import Health
from router.fleet.policy import DecodeLoad, Need, PrefillLoad, pages_for, pick_decode, pick_prefill

HEALTH = st.builds(Health, st.sampled_from([0.0, 5.0, 20.0]), st.booleans())
NAMES = st.integers(0, 9).map(str)
PREFILL = st.lists(
    st.builds(PrefillLoad, NAMES, st.integers(0, 50), st.integers(0, 9), HEALTH, st.just(False), st.integers(0, 30)),
    unique_by=lambda node: node.node_id,
)
DECODE = st.lists(
    st.builds(
        DecodeLoad,
        NAMES,
        st.integers(0, 50),
        st.integers(0, 8),
        st.just(99),
        st.just(16),
        st.integers(0, 9),
        HEALTH,
        held_tokens=st.integers(0, 30),
    ),
    unique_by=lambda node: node.node_id,
)
AVOID = st.frozensets(NAMES)


@given(PREFILL, AVOID)
def test_prefill_is_refused_only_without_nodes(nodes: list[PrefillLoad], avoid: frozenset[str]) -> None:
    assert (pick_prefill(nodes, 10.0, avoid) is None) == (not nodes)


@given(PREFILL, AVOID)
def test_nobody_better_was_passed_over(nodes: list[PrefillLoad], avoid: frozenset[str]) -> None:
    chosen = next((node for node in nodes if node.node_id == pick_prefill(nodes, 10.0, avoid)), None)
    for other in nodes:
        assert chosen is not None
        if other.health.usable(10.0) and other.node_id not in avoid:
            assert chosen.health.usable(10.0)
            assert chosen.node_id not in avoid
            work, others = (node.queued_tokens - node.held_tokens for node in (chosen, other))
            assert (work, chosen.chosen_at) <= (others, other.chosen_at)


@given(DECODE, st.integers(1, 200))
def test_decode_goes_where_there_is_room(nodes: list[DecodeLoad], tokens: int) -> None:
    healthy = [node for node in nodes if node.health.usable(10.0)] or nodes
    roomy = [node for node in healthy if node.free_pages * 16 >= tokens]
    picked = pick_decode(nodes, Need(tokens, tokens), 10.0)
    assert (picked is None) == (not roomy)
    if picked is not None:
        loads = {node.node_id: node.outstanding_tokens - node.held_tokens for node in roomy}
        assert loads[picked] == min(loads.values())


@given(st.integers(0, 10_000), st.sampled_from([32, 64, 128]))
def test_pages_hold_the_tokens_and_no_page_is_spare(tokens: int, page_tokens: int) -> None:
    pages = pages_for(tokens, page_tokens)
    assert (pages - 1) * page_tokens < tokens <= pages * page_tokens or tokens == pages == 0


def test_equal_loads_are_used_in_turn() -> None:
    nodes = [PrefillLoad("a", 5, chosen_at=2), PrefillLoad("b", 5, chosen_at=1)]
    assert pick_prefill(nodes) == "b"
