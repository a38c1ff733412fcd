"""The simulator's books, which only count, give the same answers as those of live nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.pages import Grant, PagePool
from prefill_node.host_pool import HostPool
from prefill_node.prefix_pool import PrefixGrant, PrefixPool
from sim.books import CountedPages, CountedPrefixes

MOVES = st.lists(st.tuples(st.sampled_from(["take", "extend", "give"]), st.integers(0, 9), st.integers(0, 3)))


@given(MOVES, st.integers(1, 12), st.integers(1, 4))
def test_pages(moves: list[tuple[str, int, int]], pages: int, slots: int) -> None:
    books = PagePool(pages, slots), CountedPages(pages, slots)
    held: list[list[Grant]] = []
    for move, size, which in moves:
        if move == "take":
            got = [book.take(size) for book in books]
            assert (got[0] is None) == (got[1] is None)
            if got[0] is not None and got[1] is not None:
                held.append([got[0], got[1]])
        elif held:
            pair = held[which % len(held)]
            if move == "give":
                held.remove(pair)
                for book, grant in zip(books, pair, strict=True):
                    book.give_back(grant)
            else:
                grown = [book.extend(grant, size) for book, grant in zip(books, pair, strict=True)]
                assert (grown[0] is None) == (grown[1] is None)
                if grown[0] is not None and grown[1] is not None:
                    pair[:] = [grown[0], grown[1]]
        assert books[0].free_pages == books[1].free_pages
        assert books[0].free_slots == books[1].free_slots
        assert [len(grant.pages) for grant, _ in held] == [len(grant.pages) for _, grant in held]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700), st.integers(0, 3))), st.integers(1, 12))
def test_prefixes(moves: list[tuple[bool, int, int]], pages: int) -> None:
    host = HostPool(1 << 20, lambda _: None)
    books = PrefixPool(pages, 3, 64, host, 100, reuse=False), CountedPrefixes(pages, 3, 64, host, 100)
    held: list[tuple[PrefixGrant, PrefixGrant]] = []
    for takes, tokens, which in moves:
        if takes:
            assert books[0].has_room(tokens) == books[1].has_room(tokens)
            first, second = (book.take(tokens) for book in books)
            assert (first is None) == (second is None)
            if first is not None and second is not None:
                assert (first.cached_tokens, len(first.pages)) == (second.cached_tokens, len(second.pages))
                held.append((first, second))
        elif held:
            for book, grant in zip(books, held.pop(which % len(held)), strict=True):
                book.publish(grant, 1)
                book.give_back(grant)
        assert books[0].free_pages == books[1].free_pages
        assert len(books[0].idle_slots) == len(books[1].idle_slots)
