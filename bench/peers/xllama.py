"""`python xllama.py MODEL.gguf PROMPTS.json TOKENS THREADS`: a request for each prompt, which prints a line of JSON.

Runs in an environment that has the wheel `xllamacpp`. PROMPTS.json is a list of prompts as token ids. KV is FP16;
llama.cpp chooses whether flash attention serves; batches are its defaults.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import xllamacpp


def main(model: str, prompts: list[list[int]], tokens: int, threads: int) -> None:
    """Answer each prompt, alone."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = max(map(len, prompts)) + tokens + 256
    params.n_parallel = 1
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    for nth, prompt in enumerate((prompts[0][:32], *prompts)):
        began = perf_counter()
        said = server.handle_completions(
            {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        jct_s = perf_counter() - began
        times = said["timings"]
        result = {
            "jct_s": jct_s,
            "prefill_s": times["prompt_ms"] / 1e3,
            "per_token_s": times["predicted_per_token_ms"] / 1e3,
            "version": xllamacpp.__version__,
        }
        if nth > 0:  # the first one warms up
            print(json.dumps(result))


if __name__ == "__main__":
    path, ids, count, cores = sys.argv[1:]
    main(path, json.loads(Path(ids).read_text(encoding="utf-8")), int(count), int(cores))
