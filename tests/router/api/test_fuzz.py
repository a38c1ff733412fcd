"""Whatever a client sends, the answer is a result or an error envelope below 500."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.schema import ChatRequest, CompletionRequest
from tests.router.conftest import make_served
from tests.router.scripted import Cluster

FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PLAUSIBLE = st.sampled_from([0, 1, 2, -1, 1.0, 0.5, "x", "", True, False, None, [], ["a"], [1], [[1, 2]], {}, {"5": 1}])
NAMES = st.sampled_from(FIELDS) | st.text(max_size=8)
VALID: list[dict[str, Any]] = [{"prompt": "x"}, {"messages": [{"role": "user", "content": "hi"}]}]
BODIES = st.builds(
    lambda base, extra: {**base, **extra},
    st.sampled_from(VALID),
    st.dictionaries(NAMES, PLAUSIBLE | JSON, max_size=3),
)
RAW = (
    BODIES.map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=64)
    | JSON.map(lambda v: json.dumps(v).encode())
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=RAW)
async def test_any_body_gets_an_answer_or_an_envelope(path: str, raw: bytes, tokenizer: Tokenizer) -> None:
    cluster = await Cluster(prefill=1, decode=1).join()
    app = build_app(make_served(cluster, tokenizer))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        response = await client.post(path, content=raw)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.json()["error"]["message"]
    cluster.assert_idle()
