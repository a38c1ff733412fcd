"""`python llama.py MODEL.gguf PROMPT.json TOKENS THREADS KV_TYPE ATTENTION`: one request; prints a line of JSON.

Runs in the peer's environment. ATTENTION is flash or plain; batch and micro-batch are llama.cpp's defaults.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import llama_cpp

TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}


def main(model: str, prompt: list[int], tokens: int, threads: int, kv_type: str, *, flash: bool) -> None:
    """Prefill, then decode greedily."""
    llm = llama_cpp.Llama(
        model,
        n_ctx=-(-(len(prompt) + tokens) // 256) * 256,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=flash,
        type_k=TYPES[kv_type],
        type_v=TYPES[kv_type],
        verbose=False,
    )
    llm.eval(prompt[:32])  # warm up, so that pages of weights are in memory as they are in a server
    llm.reset()
    began = perf_counter()
    llm.eval(prompt)
    answer = [llm.sample(temp=0.0)]
    prefilled = perf_counter()
    while len(answer) < tokens:
        llm.eval(answer[-1:])
        answer.append(llm.sample(temp=0.0))
    ended = perf_counter()
    result = {
        "jct_s": ended - began,
        "prefill_s": prefilled - began,
        "per_token_s": (ended - prefilled) / max(1, tokens - 1),
        "version": llama_cpp.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    path, ids, count, cores, kind, attention = sys.argv[1:]
    main(
        path,
        json.loads(Path(ids).read_text(encoding="utf-8")),
        int(count),
        int(cores),
        kind,
        flash=attention == "flash",
    )
