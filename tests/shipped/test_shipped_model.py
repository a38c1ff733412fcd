"""The checkpoint in hackkv/shipped: its shape, size and chat template, and that it attends to its context."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import hackkv
from measure import tasks
from measure.tasks import Ids, Phrases

FOLDER = Path(hackkv.__file__).parent / "shipped"
TRIALS = 8


@pytest.fixture(scope="module", name="model")
def load_model() -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(FOLDER, dtype="float32")
    return model


@pytest.fixture(scope="module", name="tokenizer")
def load_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    return tokenizer


@pytest.fixture(scope="module", name="phrases")
def make_phrases(tokenizer: PreTrainedTokenizerFast) -> Phrases:
    vocab = [str(tokenizer.decode([i])) for i in range(len(tokenizer))]
    special = frozenset(tokenizer.all_special_ids)
    return Phrases.build(lambda text: tokenizer.encode(text, add_special_tokens=False), vocab, special)


@pytest.fixture(scope="module", name="held_out")
def read_held_out(tokenizer: PreTrainedTokenizerFast) -> Ids:
    lines = (FOLDER / "held_out.jsonl").read_text().splitlines()[:8]
    texts = [json.loads(line)["text"] for line in lines]
    return np.concatenate([np.array(tokenizer.encode(text)) for text in texts])


def answered(model: LlamaForCausalLM, examples: list[tasks.Example]) -> float:
    """Share of answer tokens that are the most likely ones under teacher forcing."""
    rows = torch.from_numpy(np.stack([tasks.join(e.prompt, e.answer) for e in examples]))
    size = len(examples[0].answer)
    with torch.inference_mode():
        logits = model(rows, logits_to_keep=size + 1).logits[:, :-1]
    return float((logits.argmax(-1) == rows[:, -size:]).float().mean())


def test_the_shape_is_the_promised_one(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 2)
    assert config.max_position_embeddings == 4096
    assert config.vocab_size == len(tokenizer) == 4096
    assert 4e6 < model.num_parameters() < 8e6


def test_the_files_are_small_and_bf16() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "bfloat16"


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "def f(x):\n        return 'ünï', 1234\n\n\t# end"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_marks_turns_with_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nHello.<|end|>\n<|assistant|>\n"
    ids = tokenizer.encode(str(text))
    assert all(tokenizer.convert_tokens_to_ids(mark) in ids for mark in ("<|user|>", "<|end|>", "<|assistant|>"))


def test_it_copies(model: LlamaForCausalLM, phrases: Phrases, held_out: Ids) -> None:
    assert answered(model, [tasks.copy(s, phrases, held_out, 128) for s in range(TRIALS)]) > 0.9


def test_it_recalls(model: LlamaForCausalLM, phrases: Phrases, held_out: Ids) -> None:
    assert answered(model, [tasks.recall(s, phrases, held_out, 512) for s in range(TRIALS)]) > 0.7


def test_it_reads_text_it_has_never_seen_far_better_than_chance(model: LlamaForCausalLM, held_out: Ids) -> None:
    row = torch.from_numpy(held_out[None, :512])
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:])
    assert loss.exp() < 100, "chance is 4096"
