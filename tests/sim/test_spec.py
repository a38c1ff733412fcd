"""Specifications: an error names the wrong key, and suggests the key that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from hackkv.errors import ConfigError
from sim.capacity import flow_of, line_of, pages_of
from sim.catalogue import shipped
from sim.sizes import sizes_of
from sim.spec import Codec, ReplicaPool, Spec, read_spec

GOOD = """
model: llama-70b
prefill: {instance: g5.12xlarge, replicas: 5, tp: 4, pp: 2}
decode: {instance: p4de.24xlarge, replicas: 4, tp: 4}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def test_a_specification(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, GOOD))
    assert spec.usd_per_hour() == pytest.approx(5 * 8 / 4 * 5.67 + 4 * 4 / 8 * 27.45)
    assert line_of(spec, spec.prefill[0]) == pytest.approx(0.85 * 40e9 / 8)
    assert flow_of(spec, spec.prefill[0]) == pytest.approx(0.85 * 4 * 5e9 / 8)
    assert line_of(spec, spec.decode[0]) == flow_of(spec, spec.decode[0]) == pytest.approx(0.85 * 200e9 / 8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("modell: x", "modell: there is no such setting; did you mean model?"),
        ("network: {shareing: fair}", "network.shareing: there is no such setting; did you mean network.sharing?"),
        ("network: {sharing: fairly}", "network.sharing"),
        ("slo: {ttft: -1}", "slo.ttft"),
        ("policy: {shards: 9}", "policy.shards is 9, but a role has 4 replicas"),
        ("load: [1]", "load"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.yaml") as raised:
        read_spec(write(tmp_path, GOOD + more))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("llama-70b", "lama-70b", "model: 'lama-70b' is unknown; did you mean llama-70b?"),
        ("g5.12xlarge", "g5.12xlargo", "prefill.instance: 'g5.12xlargo' is unknown; did you mean g5.12xlarge?"),
        ("p4de.24xlarge", "p4de.24", "decode.instance: 'p4de.24' is unknown; did you mean p4de.24xlarge?"),
    ],
)
def test_an_unknown_row_is_told_the_nearest(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_spec(write(tmp_path, GOOD.replace(old, new)))
    assert words in str(raised.value)


def test_own_rows_stand_beside_the_catalogue(tmp_path: Path) -> None:
    own = """
model: {layers: 4, hidden: 256, heads: 8, kv_heads: 2, head_dim: 32, ffn: 512, vocab: 1000, parameters_b: 0.005}
decode: {instance: box, replicas: 1}
catalogue:
  gpus: {mine: {fp16_tflops: 1, memory_gb: 8, memory_gb_s: 50, bus_gb_s: 5}}
  instances: {box: {gpu: mine, gpus: 2, network_gbit_s: 10, host_gib: 16, usd_per_hour: 0.5}}
"""
    spec = read_spec(write(tmp_path, own))
    assert spec.usd_per_hour() == 0.25
    assert spec.gpu_of(spec.decode[0]).memory_gb == 8


def test_every_row_of_the_catalogue_has_a_source_and_a_gpu() -> None:
    catalogue = shipped()
    for table in (catalogue.gpus, catalogue.instances, catalogue.models):
        assert all(row.source for row in table.values())
    assert all(catalogue.gpu_of(instance) for instance in catalogue.instances.values())


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("mistral-7b", 131072),
        ("phi-3-14b", 204800),
        ("yi-34b", 245760),
        ("llama-70b", 327680),
        ("falcon-180b", 163840),
    ],
)
def test_kv_of_a_token(model: str, bytes_per_token: int) -> None:
    assert shipped().models[model].kv_bytes == bytes_per_token


def test_pages_fill_the_memory() -> None:
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=1, tp=4, reserve=0.0, max_sequences=100)
    spec = Spec(model="llama-70b", decode=(decode,), codec=Codec(name="hack"))
    sizes = sizes_of(spec.codec, spec.shape.kv_shape)
    pages = pages_of(spec, decode, sizes)
    footprint = sizes.footprint
    used = 141.1e9 + 100 * footprint.slot_bytes + pages * footprint.page_bytes
    assert 320e9 - footprint.page_bytes < used <= 320e9
    assert sizes.reads_codes
    alone = decode.model_copy(update={"tp": 1})
    with pytest.raises(ConfigError, match="decode: 1 x A100 have no room"):
        pages_of(spec.model_copy(update={"decode": (alone,)}), alone, sizes)
    assert not sizes_of(Codec(name="fp8"), spec.shape.kv_shape).codes
