"""Fields of peers that clients send to any OpenAI-style server: vLLM's and llama.cpp's.

Those that the server has as well, under vLLM's names, stand in `router.api.schema`. The lists follow vLLM's
`ChatCompletionRequest` and `CompletionRequest`, and the options of llama.cpp's `llama-server`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from router.api.fields import Ignored, Refused
from router.api.strict import Strict

_ONE_ORDER: Final = "samplers work in one fixed order and none but the documented exist"
_ALONE: Final = "says how another field works that is not supported"
_NODES: Final = "the router chooses nodes, and they move KV by themselves"


class VllmExtras(Strict):
    """vLLM's fields that completions and chat have in common."""

    use_beam_search: Annotated[Any, Refused("beam search is not supported", (False,))] = None
    length_penalty: Annotated[Any, Refused("belongs to beam search, which is not supported", (1,))] = None
    early_stopping: Annotated[Any, Refused("belongs to beam search, which is not supported", (False,))] = None
    watermarking: Annotated[Any, Refused("answers are not watermarked", (False,))] = None
    include_stop_str_in_output: Annotated[Any, Refused("stop strings are not part of the text", (False,))] = None
    spaces_between_special_tokens: Annotated[Any, Ignored("fast tokenizers put no spaces there")] = None
    truncate_prompt_tokens: Annotated[Any, Refused("prompts are not cut: send a shorter one")] = None
    truncation_side: Annotated[Any, Ignored(_ALONE)] = None
    prompt_logprobs: Annotated[
        Any, Refused("ask /v1/completions with echo and logprobs for the log-probabilities of a prompt")
    ] = None
    logprob_token_ids: Annotated[Any, Refused("ask for the most probable tokens with logprobs")] = None
    allowed_token_ids: Annotated[Any, Refused("use logit_bias")] = None
    bad_words: Annotated[Any, Refused("use logit_bias", ([],))] = None
    logits_processors: Annotated[Any, Refused("requests bring no code", ([],))] = None
    prompt_embeds: Annotated[Any, Refused("prompts are texts or token ids")] = None
    thinking_token_budget: Annotated[Any, Refused("thoughts have no budget of their own; use max_tokens", (-1,))] = None
    repetition_detection: Annotated[Any, Refused("use repetition_penalty")] = None
    priority: Annotated[Any, Refused("all requests are equal", (0,))] = None
    return_tokens_as_token_ids: Annotated[
        Any, Refused("ask /v1/completions with return_token_ids for token ids", (False,))
    ] = None
    return_token_offsets: Annotated[Any, Ignored("vLLM itself gives offsets on other routes only")] = None
    return_mm_kwargs: Annotated[Any, Ignored("there are no pictures")] = None
    return_prompt_text: Annotated[Any, Refused("the prompt does not come back", (False,))] = None
    routed_experts_prompt_start: Annotated[Any, Refused("there are no experts", (0,))] = None
    mm_processor_kwargs: Annotated[Any, Ignored("there are no pictures")] = None
    media_io_kwargs: Annotated[Any, Ignored("there are no pictures")] = None
    stream_interval: Annotated[Any, Ignored("each token is an event of its own")] = None
    request_id: Annotated[Any, Ignored("answers have ids of the server's own")] = None
    session_id: Annotated[Any, Ignored("common prefixes are found without it")] = None
    guided_decoding_backend: Annotated[Any, Ignored("grammars are compiled by one library")] = None
    guided_whitespace_pattern: Annotated[Any, Refused("JSON comes on one line; use guided_grammar for other forms")] = (
        None
    )
    kv_transfer_params: Annotated[Any, Refused(_NODES, ({},))] = None
    ec_transfer_params: Annotated[Any, Refused(_NODES, ({},))] = None
    vllm_xargs: Annotated[Any, Refused("there are no extensions of vLLM", ({},))] = None


class LlamaExtras(Strict):
    """llama.cpp's fields that completions and chat have in common."""

    n_predict: Annotated[Any, Refused("use max_tokens", (-1,))] = None
    n_keep: Annotated[Any, Ignored("contexts are not shifted, so nothing is given up")] = None
    n_discard: Annotated[Any, Ignored("contexts are not shifted, so nothing is given up")] = None
    n_indent: Annotated[Any, Refused("lines need no indentation", (0,))] = None
    n_probs: Annotated[Any, Refused("use logprobs", (0,))] = None
    n_cmpl: Annotated[Any, Refused("use n", (1,))] = None
    post_sampling_probs: Annotated[Any, Refused("logprobs are those of the model", (False,))] = None
    grammar: Annotated[Any, Refused("use guided_grammar", ("",))] = None
    json_schema: Annotated[Any, Refused("use guided_json or response_format", ({},))] = None
    samplers: Annotated[Any, Refused(_ONE_ORDER)] = None
    min_keep: Annotated[Any, Refused(_ONE_ORDER, (0,))] = None
    dynatemp_range: Annotated[Any, Refused("use temperature", (0,))] = None
    dynatemp_exponent: Annotated[Any, Ignored(_ALONE)] = None
    typical_p: Annotated[Any, Refused("use top_p or min_p", (1,))] = None
    top_n_sigma: Annotated[Any, Refused("use top_p or min_p", (-1,))] = None
    xtc_probability: Annotated[Any, Refused("use temperature", (0,))] = None
    xtc_threshold: Annotated[Any, Ignored(_ALONE)] = None
    repeat_penalty: Annotated[Any, Refused("use repetition_penalty, which looks at the whole text", (1,))] = None
    repeat_last_n: Annotated[Any, Ignored(_ALONE)] = None
    dry_multiplier: Annotated[Any, Refused("use repetition_penalty", (0,))] = None
    dry_base: Annotated[Any, Ignored(_ALONE)] = None
    dry_allowed_length: Annotated[Any, Ignored(_ALONE)] = None
    dry_penalty_last_n: Annotated[Any, Ignored(_ALONE)] = None
    dry_sequence_breakers: Annotated[Any, Ignored(_ALONE)] = None
    mirostat: Annotated[Any, Refused("use temperature and top_p", (0,))] = None
    mirostat_tau: Annotated[Any, Ignored(_ALONE)] = None
    mirostat_eta: Annotated[Any, Ignored(_ALONE)] = None
    t_max_predict_ms: Annotated[Any, Refused("close the connection to stop an answer", (0,))] = None
    cache_prompt: Annotated[Any, Ignored("KV of common prefixes is shared, with the same answers")] = None
    id_slot: Annotated[Any, Ignored(_NODES)] = None
    lora: Annotated[Any, Refused("there are no adapters", ([],))] = None
    response_fields: Annotated[Any, Refused("answers have all fields", ([],))] = None
    return_tokens: Annotated[Any, Refused("ask /v1/completions with return_token_ids for token ids", (False,))] = None
    return_progress: Annotated[Any, Refused("use return_stages", (False,))] = None
    timings_per_token: Annotated[Any, Refused("use return_stages", (False,))] = None
    sse_ping_interval: Annotated[Any, Ignored("streams are not pinged")] = None


class ChatExtras(Strict):
    """Fields of both that only chat has."""

    chat_template: Annotated[Any, Refused("the checkpoint's own template is used")] = None
    documents: Annotated[Any, Refused("put documents into a message", ([],))] = None
    echo: Annotated[Any, Refused("use continue_final_message and put the two together", (False,))] = None
    add_special_tokens: Annotated[Any, Refused("chat templates write their own special tokens", (False,))] = None
    return_token_ids: Annotated[Any, Refused("ask /v1/completions for token ids", (False,))] = None
    best_of: Annotated[Any, Refused("use n", (1,))] = None
    include_reasoning: Annotated[Any, Ignored("thoughts come apart from the answer where the model marks them")] = None
    reasoning_format: Annotated[Any, Ignored("thoughts come apart from the answer where the model marks them")] = None
    reasoning_budget_tokens: Annotated[Any, Refused("thoughts have no budget of their own; use max_tokens", (-1,))] = (
        None
    )
    thinking_budget_tokens: Annotated[Any, Refused("thoughts have no budget of their own; use max_tokens", (-1,))] = (
        None
    )
    thinking_forced_open: Annotated[Any, Refused("use continue_final_message", (False,))] = None
    parse_tool_calls: Annotated[Any, Ignored("calls are parsed where tools are offered")] = None
