"""Placement by arrays makes the same choices as the router's policy."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.policy import DecodeLoad, Need, PrefillLoad, pick_decode, pick_prefill
from sim.placing import Shelf

NODES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans(), st.integers(6, 9)), min_size=1, max_size=40
)  # tokens, free pages, up, pages
NEEDS = st.tuples(st.integers(1, 400), st.integers(0, 300))


@given(NODES, st.lists(NEEDS, max_size=8), st.frozensets(st.integers(0, 39), max_size=3))
@settings(max_examples=200)
def test_choices(nodes: list[tuple[int, int, bool, int]], needs: list[tuple[int, int]], avoid: frozenset[int]) -> None:
    names = [f"{index:03d}" for index in range(len(nodes))]
    shelf = Shelf(names, [pages for *_, pages in nodes], 64)
    chosen = dict.fromkeys(names, 0)
    for index, (tokens, free, up, _) in enumerate(nodes):
        shelf.free[index] = free
        shelf.book(index, tokens)
        shelf.mark(index, up=up)
    kept = frozenset(index for index in avoid if index < len(nodes))
    away = {names[index] for index in kept}
    for number, (landing, more) in enumerate(needs, 1):
        need = Need(landing, landing + more)
        prefill = [
            PrefillLoad(name, shelf.tokens[i], chosen[name], draining=not nodes[i][2]) for i, name in enumerate(names)
        ]
        decode = [
            DecodeLoad(name, shelf.tokens[i], nodes[i][1], nodes[i][3], 64, chosen[name], draining=not nodes[i][2])
            for i, name in enumerate(names)
        ]
        held = [(7 * index) % 200 for index in range(len(names))] if number % 2 else []
        prefill = [replace(load, held_tokens=has) for load, has in zip(prefill, held or [0] * len(names), strict=True)]
        decode = [replace(load, held_tokens=has) for load, has in zip(decode, held or [0] * len(names), strict=True)]
        found = shelf.pick_prefill(kept, held)
        assert (None if found is None else names[found]) == pick_prefill(prefill, avoid=away)
        found = shelf.pick_decode(need, kept, held)
        assert (None if found is None else names[found]) == pick_decode(decode, need, avoid=away)
        assert shelf.could_hold(need) == any(load.could_hold(need) for load in decode)
        if found is not None:
            shelf.choose(found)
            shelf.book(found, landing)
            chosen[names[found]] = number
