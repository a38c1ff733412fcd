"""Log-probabilities of prompts on the wire: the decoder refuses columns that do not fit one another."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import pytest

from hackkv.errors import TransferError
from transport import convert
from transport.coder import MAX_PROMPT_TOKENS
from transport.pb import kv_pb2 as pb


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"own": bytes(9)}, "own: 9 bytes are no whole numbers"),
        ({"own": bytes(8), "top_ids": bytes(3)}, "top_ids: 3 bytes"),
        ({"own": bytes(8), "top_ids": bytes(8), "top": bytes(8)}, "top: 1 alternatives and 2 ids of 1 tokens"),
        ({"own": bytes(16), "top_ids": bytes(12), "top": bytes(24)}, "top: 3 alternatives and 3 ids of 2 tokens"),
        ({"top_ids": bytes(4), "top": bytes(8)}, "top: 1 alternatives and 1 ids of 0 tokens"),
        ({"own": bytes(8 * MAX_PROMPT_TOKENS + 8)}, "own: 1048577 elements"),
        ({"own": bytes(8), "top_ids": bytes(4100), "top": bytes(8200)}, "top: 1025 alternatives of a token"),
        ({"own": struct.pack("2d", -1.0, math.nan)}, "own: must not be NaN"),
        ({"own": bytes(8), "top_ids": bytes(8), "top": struct.pack("2d", math.nan, math.inf)}, "top: must not be NaN"),
    ],
)
def test_columns_of_log_probabilities_fit_one_another(columns: dict[str, bytes], why: str) -> None:
    event = pb.PrefillEvent(prefilled=pb.Prefilled(token=pb.Token(), prompt_logprobs=pb.PromptLogprobs(**columns)))
    with pytest.raises(TransferError, match=re.escape(why)):
        convert.PREFILL_EVENT.decode(event.SerializeToString())


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"token_ids": [1, 2], "logprobs": [-1.0]}, "top: 1 probabilities of 2 candidates"),
        ({"logprobs": [-1.0]}, "top: 1 probabilities of 0 candidates"),
        ({"token_ids": [1] * 1025, "logprobs": [-1.0] * 1025}, "top: 1025 elements"),
        ({"token_ids": [1, 2], "logprobs": [-1.0, math.nan]}, "top: must not be NaN"),
    ],
)
def test_columns_of_candidates_fit_one_another(columns: dict[str, Any], why: str) -> None:
    event = pb.DecodeEvent(token=pb.Token(top=pb.Candidates(**columns)))
    with pytest.raises(TransferError, match=re.escape(why)):
        convert.DECODE_EVENT.decode(event.SerializeToString())
