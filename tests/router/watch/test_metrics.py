"""The content of `/metrics` after a request."""

from __future__ import annotations

import json
import math

from hackkv.nodes import CodecLoss
from tests.router.conftest import INSIDE, Inside

pytestmark = INSIDE
COMPLETIONS = "/v1/completions"


async def test_metrics_have_help_and_the_transfer_is_proven(api: Inside) -> None:
    await api.http.post(COMPLETIONS, json={"prompt": "xyz", "max_tokens": 4})
    page = (await api.http.get("/metrics")).text
    for line in (
        'hackkv_kv_transfer_bytes_total{codec="hack",plane="k_codes"} 6.0',
        'hackkv_kv_transfer_bytes_total{codec="hack",plane="header"} 7.0',
        'hackkv_kv_transfer_fp16_bytes_total{codec="hack"} 96.0',
        "hackkv_kv_transfer_tokens_total 3.0",
        "hackkv_prompt_tokens_recomputed_total 0.0",
        'hackkv_kv_pages{node="d0",role="decode",state="free"} 64.0',
        'hackkv_requests_total{outcome="length"} 1.0',
        'hackkv_nodes{role="decode"} 2.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 3.0',
        'vllm:generation_tokens_total{model_name="tiny"} 4.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0',
    ):
        assert line in page
    helped = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP") and len(line.split()) > 3}
    typed = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert typed <= helped


async def test_what_a_codec_costs_is_told_everywhere_even_if_it_is_no_number(api: Inside) -> None:
    await api.cluster.report("d0", loss=CodecLoss(0.0125, 0.97, 1.01, 600))
    await api.cluster.report("d1", loss=CodecLoss(math.nan, 0.0, math.inf, 600))
    page = (await api.http.get("/metrics")).text
    for line in (
        'hackkv_codec_kl{node="d0",role="decode"} 0.0125',
        'hackkv_codec_top1_agreement{node="d0",role="decode"} 0.97',
        'hackkv_codec_perplexity_ratio{node="d0",role="decode"} 1.01',
        'hackkv_codec_kl{node="d1",role="decode"} NaN',
        'hackkv_codec_perplexity_ratio{node="d1",role="decode"} +Inf',
    ):
        assert line in page
    assert 'hackkv_codec_kl{node="p0"' not in page  # that node measured nothing
    told = json.loads((await api.http.get("/version")).text)["nodes"]
    assert told["p0"]["codec_loss"] is None
    assert told["d0"]["codec_loss"] == {"kl": 0.0125, "top1": 0.97, "perplexity_ratio": 1.01, "tokens": 600}
    assert told["d1"]["codec_loss"] == {"kl": None, "top1": 0.0, "perplexity_ratio": None, "tokens": 600}
    nodes = (await api.http.get("/api/cluster")).json()["nodes"]
    assert {node["id"]: node["codec_loss"] for node in nodes} == {name: told[name]["codec_loss"] for name in told}
