"""The shipped model gives the same greedy tokens in transformers and here, with exact KV, through the serving path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import hackkv
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.worker import Worker, load_worker
from hackkv.tokenizer import Tokenizer
from hackkv.types import Request, Sampling

FOLDER = Path(hackkv.__file__).parent / "shipped"
NEW_TOKENS = 48
PROMPTS = [
    "def read_lines(path):\n",
    "The :mod:`os` module provides",
    Path(hackkv.__file__).with_name("types.py").read_text(encoding="utf-8")[:3000],
]


@pytest.fixture(scope="module", name="oracle")
def make_oracle() -> LlamaForCausalLM:
    oracle: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return oracle


@pytest.fixture(scope="module", name="worker")
def make_worker() -> Worker:
    return load_worker(ModelConfig(path=str(FOLDER), dtype="float32"), CodecConfig(name="fp16"))


@pytest.mark.parametrize("prompt", PROMPTS, ids=["code", "documentation", "long"])
def test_greedy_tokens_equal_transformers(oracle: LlamaForCausalLM, worker: Worker, prompt: str) -> None:
    ids = tuple(Tokenizer(FOLDER).encode(prompt))
    prompt_ids = torch.tensor([ids])
    whole = oracle.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=None,
    )
    request = Request("r", ids, Sampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0))
    assert [token.token_id for token in generate(worker, request)] == whole[0, len(ids) :].tolist()
