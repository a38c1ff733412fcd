"""A page's name depends on everything on which its bytes depend, and on nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hackkv.page_names import MARK_BYTES, Naming, pack_marks
from hackkv.types import WIRE_FORM, Fingerprint

HACK = Fingerprint((("codec", "hack"), (WIRE_FORM, "raw")))
NAMING = Naming(2, HACK)


def test_names_follow_tokens_fingerprint_and_salt() -> None:
    ids = (1, 2, 3, 4, 5)
    names = NAMING.names(ids, "")
    assert len(names) == 2
    assert NAMING.names(ids[:4], "") == names
    assert NAMING.names((*ids, 6), "")[:2] == names
    others = [
        NAMING.names((1, 9, 3, 4), ""),
        NAMING.names(ids, "salt"),
        Naming(2, Fingerprint((("codec", "fp16"),))).names(ids, ""),
    ]
    assert len({name.digest for each in (names, *others) for name in each}) == 8


def test_names_do_not_follow_how_kv_travels() -> None:
    other = Fingerprint(((WIRE_FORM, "zstd"), ("codec", "hack")))
    assert Naming(2, other).names((1, 2), "") == NAMING.names((1, 2), "")


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=40), pages=st.integers(0, 10), page_tokens=st.integers(1, 5))
def test_names_go_on_after_a_page(ids: list[int], pages: int, page_tokens: int) -> None:
    naming = Naming(page_tokens, HACK)
    whole = naming.names(ids, "s")
    pages = min(pages, len(whole))
    rest = naming.names(ids[pages * page_tokens :], "s", whole[pages - 1] if pages else None)
    assert whole == (*whole[:pages], *rest)
    assert naming.marks(ids, "s") == [name.digest[:MARK_BYTES] for name in whole]
    assert pack_marks(name.digest for name in whole) == b"".join(naming.marks(ids, "s"))
