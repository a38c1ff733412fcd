"""Time that nodes report is credited to the window in which it was spent, however late the report comes."""

from __future__ import annotations

from hackkv.timing import Stage, StageClock, SubStage
from hackkv.types import Decoded, HandedOff, Prefilled, Receipt, Token
from router.life.lifecycle import Lifecycle
from router.life.windows import AttemptWindows
from tests.hand import Hand


def test_parts_stay_within_their_stages_when_token_0_comes_late() -> None:
    """The nodes report 8 seconds. Six of them had passed when the router heard of token 0."""
    hand = Hand()
    clock = StageClock(hand)
    receipt = Receipt("t", 1, (), 0, 0, 0.0)
    with AttemptWindows(clock, Lifecycle()) as windows:
        windows.dispatched()
        hand.time += 16
        windows.prefilled(Prefilled(Token(0, 5), 1.0, 6.0, quantize_s=2.0, computed_tokens=1, wire_encode_s=1.0))
        windows.handed_off(HandedOff(receipt, swap_wait_s=0.0, transfer_s=1.0, overlapped_bytes=0))
        hand.time += 2
        windows.decoded(Decoded(queue_s=1.0, decode_s=6.0, attend_s=4.0, approximation_s=2.0))
    stages = {stage: seconds for stage, seconds in clock.stages().items() if seconds}
    assert stages == {
        Stage.PREFILL_QUEUE: 1.0,
        Stage.PREFILL: 6.0,
        Stage.STREAM: 9.0,
        Stage.TRANSFER: 0.25,
        Stage.DECODE_QUEUE: 0.25,
        Stage.DECODE: 1.5,
    }
    assert clock.sub_stages == {
        SubStage.FETCH: 0.0,
        SubStage.QUANTIZE: 2.0,
        SubStage.WIRE_ENCODE: 1.0,
        SubStage.WIRE_DECODE: 0.0,
        SubStage.ATTEND: 1.0,
        SubStage.APPROXIMATION: 0.5,
    }
