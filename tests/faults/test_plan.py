"""A plan that makes no sense is refused with a reason. Rules strike where, when and as often as they say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.loop import run
from decode_node.pages import PagePool
from faults.injector import Injector
from faults.plan import ON_FRAMES, Action, FaultPlan, FaultRule, Point
from faults.process import suffer
from faults.seams import DECODE_POINTS, PREFILL_POINTS
from hackkv.config import load
from hackkv.errors import ConfigError, NodeLost
from hackkv.types import DecodeEvent, KvFrame, PlaneSpan, PrefillEvent


class Noted:
    """Hands that only record actions."""

    def __init__(self) -> None:
        self.did: list[tuple[str, str, float]] = []

    def kill(self, node: str, back_after_s: float) -> None:
        self.did.append(("kill", node, back_after_s))

    def abort(self, request: str) -> None:
        self.did.append(("abort", request, 0.0))

    def fill(self, node: str, seconds: float) -> None:
        self.did.append(("fill", node, seconds))


def frame(payload: bytes = bytes(range(64)), transfer_id: str = "t") -> KvFrame:
    return KvFrame(
        transfer_id, 0, 0, 0, 1, 0, 1, 0, 1, 0, (PlaneSpan("k_codes", len(payload), len(payload), 1),), payload
    )


async def hits(rule: FaultRule, moments: int, node: str = "d", seed: int = 0) -> list[int]:
    """The numbers, from 1, of the first `moments` moments at which a rule strikes."""
    hands = Noted()
    injector = Injector(FaultPlan(seed=seed, rules=(rule,)), node, hands)
    struck = []
    for moment in range(1, moments + 1):
        before = len(hands.did)
        await injector.reach(rule.at, "r")
        if len(hands.did) > before:
            struck.append(moment)
    return struck


def abort(**settings: object) -> FaultRule:
    return FaultRule.model_validate({"at": Point.TOKEN, "do": Action.ABORT, **settings})


@pytest.mark.parametrize(
    ("rule", "struck"),
    [
        (abort(), [1]),
        (abort(times=2), [1, 2]),
        (abort(times=0), [1, 2, 3, 4, 5]),
        (abort(nth=3), [3]),
        (abort(chance=0.0, times=0), []),
        (abort(node="d*"), [1]),
        (abort(node="p*"), []),
        (abort(request="other"), []),
    ],
)
async def test_a_rule_strikes_as_often_as_it_says(rule: FaultRule, struck: list[int]) -> None:
    assert await hits(rule, 5) == struck


@given(seed=st.integers(0, 99), chance=st.floats(0.1, 0.9), node=st.sampled_from(["a", "b"]))
def test_chance_follows_from_seed_and_node_alone(seed: int, chance: float, node: str) -> None:
    rule = abort(chance=chance, times=0)
    first, again = (asyncio.run(hits(rule, 60, node, seed)) for _ in range(2))
    assert first == again


async def test_nodes_have_chances_of_their_own() -> None:
    rule = abort(chance=0.5, times=0)
    assert await hits(rule, 60, "a") != await hits(rule, 60, "b")


async def test_a_cut_is_a_lost_node() -> None:
    injector = Injector(FaultPlan(rules=(FaultRule(at=Point.TOKEN, do=Action.CUT),)), "d-1", Noted())
    with pytest.raises(NodeLost, match=r"d-1: .*decode\.token"):
        await injector.reach(Point.TOKEN, "r")


@given(payload=st.binary(min_size=1, max_size=64), seed=st.integers(0, 9))
def test_corruption_flips_one_bit(payload: bytes, seed: int) -> None:
    injector = Injector(FaultPlan(seed=seed, rules=(FaultRule(at=Point.FRAME, do=Action.CORRUPT),)), "p", Noted())
    (rotten,) = asyncio.run(injector.reach_frame(frame(payload)))
    flipped = [a ^ b for a, b in zip(bytes(rotten.payload), payload, strict=True)]
    assert sum(byte.bit_count() for byte in flipped) == 1
    assert rotten.planes == frame(payload).planes


async def test_corruption_leaves_an_empty_payload() -> None:
    injector = Injector(FaultPlan(rules=(FaultRule(at=Point.FRAME, do=Action.CORRUPT),)), "p", Noted())
    (same,) = await injector.reach_frame(frame(b""))
    assert bytes(same.payload) == b""


@pytest.mark.parametrize(("action", "count"), [(Action.DROP, 0), (Action.DUPLICATE, 2)])
async def test_frames_are_lost_and_doubled(action: Action, count: int) -> None:
    injector = Injector(FaultPlan(rules=(FaultRule(at=Point.FRAME, do=action, times=1),)), "p", Noted())
    assert await injector.reach_frame(frame()) == [frame()] * count
    assert await injector.reach_frame(frame()) == [frame()]


@given(payload=st.binary(min_size=1, max_size=64))
def test_a_parcel_of_a_link_suffers_too(payload: bytes) -> None:
    rules = (FaultRule(at=Point.SEND, do=Action.CORRUPT), FaultRule(at=Point.SEND, do=Action.CUT, nth=2))
    injector = Injector(FaultPlan(rules=rules), "p", Noted())
    rotten = asyncio.run(injector.reach_parcel(payload))
    assert sum((a ^ b).bit_count() for a, b in zip(bytes(rotten), payload, strict=True)) == 1
    with pytest.raises(NodeLost, match=r"p: .*link\.send"):
        asyncio.run(injector.reach_parcel(payload))


async def test_frames_know_their_request_by_the_transfer() -> None:
    rule = FaultRule(at=Point.FRAME, do=Action.DROP, request="victim", times=0)
    injector = Injector(FaultPlan(rules=(rule,)), "p", Noted())
    injector.requests["t"] = "victim"
    assert await injector.reach_frame(frame()) == []
    assert await injector.reach_frame(frame(transfer_id="u")) == [frame(transfer_id="u")]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{at: decode.token, do: corrupt}", "wire.frame and link.send only"),
        ("{at: link.send, do: drop}", "wire.frame only"),
        ("{at: decode.token, do: delay}", "needs seconds"),
        ("{at: wire.frame, do: slow}", "bytes_per_s"),
        ("{at: decode.token, do: cut, bytes_per_s: 5}", "bytes_per_s"),
        ("{at: nowhere, do: cut}", "rules.0.at"),
        ("{at: decode.token, do: explode}", "rules.0.do"),
        ("{at: decode.token, do: cut, chance: 2}", "rules.0.chance"),
        ("{at: decode.token, do: cut, tiems: 2}", "rules.0.tiems"),
    ],
)
def test_a_plan_without_sense_is_refused_by_name(rule: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"rules:\n  - {rule}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        load(FaultPlan, path)
    assert str(path) in str(caught.value)


def test_a_process_suffers_nothing_unless_told(tmp_path: Path) -> None:
    pool = PagePool(4, 4)
    assert suffer(None, "p", pool) is None
    plan = tmp_path / "plan.yaml"
    plan.write_text("rules: [{at: decode.token, do: abort}]")
    with pytest.raises(ConfigError, match="what a client does"):
        suffer(plan, "p", pool)


def test_a_process_fills_its_own_memory_for_a_while(tmp_path: Path) -> None:
    pool = PagePool(4, 4)
    plan = tmp_path / "plan.yaml"
    plan.write_text("rules: [{at: decode.token, do: fill, seconds: 5}]")
    injector = suffer(plan, "d", pool)
    assert injector is not None

    async def free_pages() -> tuple[int, int]:
        await injector.reach(Point.TOKEN, "r")
        filled = pool.free_pages
        await asyncio.sleep(6)
        return filled, pool.free_pages

    assert run(free_pages()) == (0, 4)


def test_the_frame_actions_are_those_that_need_a_frame() -> None:
    assert {Action.DROP, Action.CORRUPT, Action.DUPLICATE, Action.SLOW} == ON_FRAMES


def test_every_event_of_a_node_is_a_point() -> None:
    assert set(PREFILL_POINTS) == set(get_args(PrefillEvent))
    assert set(DECODE_POINTS) == set(get_args(DecodeEvent))
