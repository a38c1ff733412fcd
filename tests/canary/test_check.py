"""The check of a codec: its three numbers, the bound, the refusal with its alternatives, and the cache."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

import pytest
import torch

from hackkv.canary import Meter, Reference, check_codec, codec_loss, read_exactly
from hackkv.canary.check import canary_ids
from hackkv.codecs import CODECS
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Unloaded
from hackkv.nodes import CodecLoss
from tests.canary.conftest import CONTEXT, SPOILING
from tests.pair import EVICTING

LOSSY = CodecConfig(name="hack", settings={"page_tokens": 32})


def measured(model: ModelConfig, name: str) -> CodecLoss:
    meter = Meter(model, canary_ids)
    return meter.measure(meter.plan(CodecConfig(name=name)))


def test_rows_in_fp16_cost_nothing(model: ModelConfig) -> None:
    loss = measured(model, "fp16")
    assert abs(loss.kl) < 1e-4
    assert loss.top1 > 0.98
    assert loss.perplexity_ratio == pytest.approx(1, abs=1e-3)
    assert loss.tokens == CONTEXT


@pytest.mark.parametrize("name", EVICTING)
def test_an_eviction_is_judged_by_what_follows_it(model: ModelConfig, name: str) -> None:
    """Half of the text follows the eviction and reads the rows that stayed. If all rows stay and are read, nothing is
    lost."""
    meter = Meter(model, canary_ids)
    few, every = (
        meter.measure(meter.plan(CodecConfig(name=name, settings={"page_tokens": 32, **settings})))
        for settings in ({}, {"budget": "100%", "select": "100%"})
    )
    assert few.tokens == every.tokens == CONTEXT // 2
    assert abs(every.kl) < 1e-4 < few.kl
    assert every.perplexity_ratio == pytest.approx(1, abs=1e-3)


def test_the_numbers_are_what_their_definitions_say(model: ModelConfig) -> None:
    """The reference has other hidden states than the codec, whose own are nearly those of exact KV."""
    meter = Meter(model, canary_ids)
    planned = meter.plan(CodecConfig(name="fp16"))
    plain, ids = planned.load_plain(), list(canary_ids(planned))
    exact = read_exactly(plain, ids)
    with torch.inference_mode():
        noise = torch.randn(exact.hidden.shape, generator=torch.Generator().manual_seed(0))
        other = Reference(exact.ids, exact.hidden + 0.3 * noise)
        loss = codec_loss(plain, planned.codec, other)
        p, q = (plain.logits(x.hidden).double().log_softmax(-1) for x in (other, exact))
        said = (torch.arange(len(ids) - 1), torch.tensor(ids[1:]))
        assert loss.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.01)
        assert loss.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.01)
        assert loss.perplexity_ratio == pytest.approx(float((p[:-1][said] - q[:-1][said]).mean().exp()), rel=0.01)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", SPOILING)
def test_a_codec_that_destroys_is_refused_with_those_that_pass(model: ModelConfig, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_codec(model, CodecConfig(name=name))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"codec.name: {name!r} would spoil the answers of tiny: KL ")
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"fp16", "fp8", "rot-k4v4"} <= listed
    assert listed.isdisjoint(SPOILING)
    assert f"{name},allow_loss" in lines[-1]


@pytest.mark.parametrize("name", SPOILING)
def test_a_loss_that_is_allowed_is_a_warning(model: ModelConfig, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loss = check_codec(model, CodecConfig(name=name, allow_loss=True))
    assert loss is not None
    assert not loss.kl <= 0.15
    assert math.isnan(loss.kl) == (name == "nan")
    assert [record.message for record in caplog.records if f"codec {name} spoils the answers of tiny" in record.message]


@pytest.mark.usefixtures("known")
def test_the_bound_is_a_setting(model: ModelConfig) -> None:
    loss = check_codec(model, LOSSY)
    assert loss is not None
    assert 0 < loss.kl < 0.15
    with pytest.raises(ConfigError, match="max_kl is"):
        check_codec(model, LOSSY.model_copy(update={"max_kl": loss.kl / 2}))


@pytest.mark.parametrize("name", CODECS)
def test_lossless_codecs_are_not_measured_and_all_others_are(
    model: ModelConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(_: Meter, planned: Unloaded) -> CodecLoss:
        asked.append(planned.codec.name)
        return CodecLoss(0.01, 1.0, 1.0, 5)

    monkeypatch.setattr(Meter, "measure", measure)
    loss = check_codec(model, CodecConfig(name=name))
    assert asked == ([] if loss is None else [name])
    assert (loss is None) == (name == "fp16")


async def test_it_holds_up_no_event_loop(model: ModelConfig) -> None:
    """Nodes run it in a thread; inference mode belongs to that thread."""
    said: list[str] = []
    loss = await asyncio.to_thread(check_codec, model, LOSSY, said.append)
    assert loss is not None
    assert said[0] == "checking what codec hack costs this model ..."
    assert said[1].startswith("codec hack costs tiny: KL ")
    assert not torch.is_inference_mode_enabled()


def test_the_second_start_computes_nothing_and_another_fingerprint_does(
    model: ModelConfig, tmp_path: Path, own_cache: Path
) -> None:
    said: list[str] = []

    def check(model: ModelConfig, codec: CodecConfig) -> CodecLoss | None:
        said.clear()
        return check_codec(model, codec, said.append)

    first = check(model, LOSSY)
    assert len(said) == 2
    assert check(model, LOSSY) == first
    assert len(said) == 1
    check(model, LOSSY.model_copy(update={"max_kl": 1.0}))
    assert len(said) == 1  # a bound changes no number
    check(model, CodecConfig(name="hack"))
    assert len(said) == 2
    other = write_tiny(tmp_path / "other", Tiny(max_context=CONTEXT, seed=1))
    check(ModelConfig(path=str(other), dtype="float32"), LOSSY)
    assert len(said) == 2
    check(model.model_copy(update={"dtype": "bfloat16"}), LOSSY)
    assert len(said) == 2
    check(model.model_copy(update={"backend": "reference"}), LOSSY)
    assert len(said) == 2
    assert len(list(own_cache.glob("*.json"))) == 5


@pytest.mark.parametrize("vocab", [300, 512])
def test_a_model_reads_what_it_knows_and_holds(tmp_path: Path, vocab: int) -> None:
    folder = write_tiny(tmp_path / "small", Tiny(max_context=40, vocab=vocab))
    loss = check_codec(ModelConfig(path=str(folder)), LOSSY)
    assert loss is not None
    assert loss.tokens == 40
