"""The four dashboards: time by stage, load of the nodes, bytes on the wire, service to clients."""

from __future__ import annotations

from tools.dashboards.charts import Board, Chart, Draw, Query

RATE = "$__rate_interval"
STAGE = "hackkv_request_stage_seconds"
PAGES = "hackkv_kv_pages"


def quantiles(name: str) -> tuple[Query, ...]:
    """p50, p90 and p99 of a recorded series."""
    return (Query(f"{name}:quantile", "p{{quantile}}"),)


def quantile_of(histogram: str, share: float) -> Query:
    """One quantile of a histogram of the router."""
    bucket_rate = f"sum by (le) (rate({histogram}_bucket[{RATE}]))"
    return Query(f"histogram_quantile({share}, {bucket_rate})", f"p{share * 100:g}")


def mean_by(label: str, histogram: str, window: str = RATE) -> str:
    """Mean of a histogram by `label`: the rate of its sum over the rate of its count."""
    return f"sum by ({label}) (rate({histogram}_sum[{window}])) / sum by ({label}) (rate({histogram}_count[{window}]))"


def rate(counter: str) -> str:
    """The rate of a counter, whose name is given without `_total`."""
    return f"rate({counter}_total[{RATE}])"


JCT = Board(
    "jct",
    "hackkv: JCT breakdown",
    (
        Chart(
            "Job completion time",
            "From the first byte of the request to the last byte of the answer, over five minutes.",
            "s",
            quantiles("hackkv:jct_seconds"),
            Draw.NUMBERS,
        ),
        Chart(
            "Requests per second",
            "Sequences that ended, however they ended.",
            "reqps",
            (Query(f"sum(rate(hackkv_requests_total[{RATE}]))", "all"),),
            Draw.NUMBERS,
            width=6,
        ),
        Chart(
            "KV on the wire, as a share of FP16",
            "Bytes that crossed, headers included, beside what the same rows would weigh in FP16.",
            "percentunit",
            (Query("hackkv:kv_bytes_to_fp16:ratio", "{{codec}}"),),
            Draw.NUMBERS,
            width=6,
        ),
        Chart(
            "Mean JCT by stage",
            "The stages of a request sum to its time. A step of decoding counts fully for every sequence in it.",
            "s",
            (Query(mean_by("stage", STAGE), "{{stage}}"),),
            Draw.STACKED,
            width=24,
        ),
        Chart(
            "Mean JCT by codec",
            "As Fig. 10 of the HACK paper, over the whole range of this dashboard: serve one codec after the other.",
            "s",
            (Query(mean_by("codec, stage", STAGE, "$__range"), ""),),
            Draw.BARS_BY_CODEC,
        ),
        Chart(
            "Parts of stages",
            "Quantizing and coding for the wire are parts of prefill; attention and the approximation's corrections "
            "are parts of decoding. Decoding what came over the wire overlaps with prefill and transfer.",
            "s",
            (Query(mean_by("stage", "hackkv_request_substage_seconds"), "{{stage}}"),),
        ),
        Chart("JCT", "Over five minutes.", "s", quantiles("hackkv:jct_seconds")),
        Chart(
            "p99 of each stage",
            "Over five minutes. These do not sum to the p99 of the whole: different requests are slow in each.",
            "s",
            (Query('hackkv:stage_seconds:quantile{quantile="0.99"}', "{{stage}}"),),
        ),
    ),
)

CLUSTER = Board(
    "cluster",
    "hackkv: cluster",
    (
        Chart(
            "Nodes",
            "With a live lease.",
            "none",
            (Query("hackkv_nodes", "{{role}}"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Sequences",
            "In the router altogether; computed by nodes; waiting in the router or on nodes.",
            "none",
            (
                Query("hackkv_router_inflight", "in the router"),
                Query("vllm:num_requests_running", "running"),
                Query("vllm:num_requests_waiting", "waiting"),
            ),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Decode memory in use",
            "Share of all decode nodes' KV pages.",
            "percentunit",
            (Query("vllm:kv_cache_usage_perc", "pages"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Load by node",
            "Tokens of requests that the router has placed: queued (prefill) or outstanding (decode).",
            "none",
            (Query("hackkv_node_tokens", "{{node}}"),),
        ),
        Chart(
            "Running and waiting",
            "Sequences, as nodes last reported.",
            "none",
            (
                Query("vllm:num_requests_running", "running"),
                Query("vllm:num_requests_waiting", "waiting"),
                Query("hackkv_router_inflight", "in the router"),
            ),
        ),
        Chart(
            "KV pages in use",
            "As a share of the node's pages.",
            "percentunit",
            (
                Query(
                    f"{PAGES}{{state='used'}} / ignoring(state) (sum without (state) ({PAGES}{{state!='reserved'}}))",
                    "{{node}}",
                ),
            ),
        ),
        Chart(
            "KV in host memory",
            "Compressed KV outside the pages: what waits for a decode node or is kept for a failover (prefill), and "
            "sequences swapped out (decode).",
            "bytes",
            (Query("hackkv_host_pool_bytes", "{{node}}"),),
        ),
        Chart(
            "Swaps",
            "Sequences that a decode node moved to host memory because its pages ran out, and back.",
            "ops",
            (
                Query(f"sum(rate(hackkv_swap_out_total[{RATE}]))", "out"),
                Query(f"sum(rate(hackkv_swap_in_total[{RATE}]))", "in"),
            ),
        ),
        Chart(
            "Prompt tokens that were there already",
            "Share of prompt tokens that a prefill node had in its pages, fetched, and that a decode node held.",
            "percentunit",
            (
                Query(f"{rate('hackkv_prefix_hits')} / {rate('hackkv_prefix_queries')}", "{{node}}"),
                Query(f"{rate('hackkv_held_hits')} / {rate('hackkv_held_queries')}", "{{node}}"),
                Query(f"sum({rate('hackkv_kv_fetched_tokens')}) / sum({rate('vllm:prompt_tokens')})", "fetched"),
            ),
        ),
        Chart(
            "Kept pages",
            "Sealed pages that nodes keep for later prompts, in pages and in host memory.",
            "none",
            tuple(
                Query(f"hackkv_{kind}_{where}pages", f"{{{{node}}}}{', host memory' if where else ''}")
                for kind in ("prefix", "held")
                for where in ("", "host_")
            ),
        ),
        Chart(
            "Prompts placed where they are held",
            "Share of prompt tokens that the router expected the chosen node to hold.",
            "percentunit",
            (Query(f"{rate('hackkv_dispatched_held_tokens')} / {rate('hackkv_dispatched_tokens')}", "{{role}}"),),
        ),
        Chart(
            "Failovers",
            "Sequences that went on with other nodes after one was lost, full or about to stop.",
            "reqps",
            (Query(f"sum by (kind) (rate(hackkv_failovers_total[{RATE}]))", "{{kind}}"),),
        ),
    ),
)

WIRE = Board(
    "wire",
    "hackkv: wire",
    (
        Chart(
            "KV as a share of FP16",
            "Over five minutes; the open page of a prompt travels in FP16, so short prompts compress less.",
            "percentunit",
            (Query("hackkv:kv_bytes_to_fp16:ratio", "{{codec}}"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Handoffs refused",
            "KV that a decode node found damaged, incomplete or not meant for it, since the node started.",
            "none",
            (Query("hackkv_handoffs_refused_total", "{{node}}"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Prompt tokens recomputed",
            "That a decode node served without having received their KV; must stay 0.",
            "none",
            (Query("hackkv_prompt_tokens_recomputed_total", "tokens"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart(
            "Bytes by plane",
            "What a page consists of, and `header`, the framing. open_k and open_v are rows in FP16.",
            "Bps",
            (Query(f"sum by (plane) (rate(hackkv_kv_transfer_bytes_total[{RATE}]))", "{{plane}}"),),
            Draw.STACKED,
        ),
        Chart(
            "Bytes beside FP16",
            "What crossed the wire, and what FP16 would have been.",
            "Bps",
            (
                Query(f"sum by (codec) (rate(hackkv_kv_transfer_bytes_total[{RATE}]))", "{{codec}}"),
                Query(f"sum by (codec) (rate(hackkv_kv_transfer_fp16_bytes_total[{RATE}]))", "{{codec}} as FP16"),
            ),
        ),
        Chart(
            "Share of FP16",
            "Headers included.",
            "percentunit",
            (Query("hackkv:kv_bytes_to_fp16:ratio", "{{codec}}"),),
        ),
        Chart(
            "Prompt tokens handed over",
            "Whose KV was verified and committed by a decode node.",
            "none",
            (Query(f"rate(hackkv_kv_transfer_tokens_total[{RATE}])", "tokens per second"),),
        ),
        Chart(
            "Transfer that requests waited for",
            "What is left of the transfer after the first token; most of it overlaps prefill.",
            "s",
            (Query('hackkv:stage_seconds:quantile{stage="transfer"}', "p{{quantile}}"),),
        ),
        Chart(
            "Handoffs refused",
            "In five minutes, by node.",
            "none",
            (Query("increase(hackkv_handoffs_refused_total[5m])", "{{node}}"),),
        ),
    ),
)

REQUESTS = Board(
    "requests",
    "hackkv: requests",
    (
        Chart(
            "Time to first token", "Over five minutes.", "s", quantiles("hackkv:ttft_seconds"), Draw.NUMBERS, width=8
        ),
        Chart(
            "Time per output token", "Over five minutes.", "s", quantiles("hackkv:tpot_seconds"), Draw.NUMBERS, width=8
        ),
        Chart(
            "Requests that fail",
            "Share that failed, timed out or found no room, over five minutes.",
            "percentunit",
            (Query("hackkv:failed_requests:ratio", "failed"),),
            Draw.NUMBERS,
            width=8,
        ),
        Chart("Time to first token", "Over five minutes.", "s", quantiles("hackkv:ttft_seconds")),
        Chart(
            "Time per output token", "Mean of a sequence after its first token.", "s", quantiles("hackkv:tpot_seconds")
        ),
        Chart(
            "Tokens per second",
            "Prompt tokens prefilled, and tokens generated.",
            "none",
            (
                Query(f"sum(rate(vllm:prompt_tokens_total[{RATE}]))", "prompt"),
                Query(f"sum(rate(vllm:generation_tokens_total[{RATE}]))", "generated"),
            ),
        ),
        Chart(
            "Between two tokens",
            "The gap that a reader sees, of all tokens.",
            "s",
            tuple(quantile_of("vllm:inter_token_latency_seconds", share) for share in (0.5, 0.9, 0.99)),
        ),
        Chart(
            "Prompt length",
            "Tokens.",
            "none",
            tuple(quantile_of("vllm:request_prompt_tokens", share) for share in (0.5, 0.9, 0.99)),
        ),
        Chart(
            "Output length",
            "Tokens.",
            "none",
            tuple(quantile_of("vllm:request_generation_tokens", share) for share in (0.5, 0.9, 0.99)),
        ),
        Chart(
            "Finish reasons",
            "Of sequences that reached their end.",
            "reqps",
            (Query(f"sum by (finished_reason) (rate(vllm:request_success_total[{RATE}]))", "{{finished_reason}}"),),
            Draw.STACKED,
        ),
        Chart(
            "Outcomes",
            "Of all sequences.",
            "reqps",
            (Query("hackkv:requests:rate", "{{outcome}}"),),
            Draw.STACKED,
        ),
        Chart(
            "Refused",
            "HTTP requests without a sequence, by status.",
            "reqps",
            (Query(f"sum by (status) (rate(hackkv_http_refused_total[{RATE}]))", "{{status}}"),),
            Draw.STACKED,
        ),
    ),
)

BOARDS = (JCT, CLUSTER, WIRE, REQUESTS)
