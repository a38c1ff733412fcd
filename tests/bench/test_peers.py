"""Wrong arguments are named before a model is made. Ablations are compared with the system that they reduce."""

from __future__ import annotations

from pathlib import Path

import pytest
from hack_kernels import load
from typer.testing import CliRunner

from bench.peers.__main__ import CELL_TOKENS, _prompts, app
from bench.peers.model import SHAPE
from bench.peers.ours import Run, serve, serve_together
from bench.peers.report import CODECS, codecs_section
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.timing import Stage
from hackkv.types import KvShape


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["codecs", "--sizes", "2k"], "'2k' is not numbers from 1 to"),
        (["codecs", "--sizes", "2048,40960"], "from 1 to 40896"),
        (["codecs", "--only", "fp16,hakc"], "'hakc' unknown; known: fp16, "),
        (["codecs", "--out", "/no/folder"], "'/no/folder' does not exist"),
        (["beside", "--only", "hackkv,llama"], "'llama' unknown; known: hackkv, "),
        (["beside", "--isa", "avx3"], "'avx3' is not one of"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert named in done.output


def test_every_codec_of_the_table_can_be_made() -> None:
    fingerprints = {
        make_codec(CodecConfig.model_validate(codec), KvShape(1, 1, 128), load("reference")).fingerprint()
        for codec in CODECS.values()
    }
    assert len(fingerprints) == len(CODECS)


def test_long_prompts_run_less_often_but_once() -> None:
    assert [_prompts([2048, 8192, 32768], nth) for nth in range(4)] == [
        [2048, 8192, 32768],
        [2048, 8192],
        [2048, 8192],
        [2048],
    ]
    assert CELL_TOKENS < 32768


def run(prefill_s: float, decode_s: float) -> Run:
    stages = {**dict.fromkeys(Stage, 0.0), Stage.PREFILL: prefill_s, Stage.DECODE: decode_s}
    return Run(prefill_s + decode_s, {str(stage): spent for stage, spent in stages.items()}, {}, 10, 64)


def test_ablations_are_compared_with_the_codec_they_cut_from() -> None:
    each = {"fp16": [run(4, 4)], "hack-paper": [run(2, 2)], "hack-paper without RQE": [run(2, 3)]}
    text, record = codecs_section(None, {"machine": "a machine"}, {2048: each, 8192: {}})
    assert "| 2048 | hack-paper without RQE | 1.25 | 1.00 | 1.50 |" in text
    assert "without SE |" not in text
    assert "| 2048 | hack-paper | 1 | 4.00 | 0.50 |" in text
    assert record["results"]["2048"]["fp16"][0]["jct_s"] == 8


@pytest.mark.slow
def test_a_codec_that_spoils_the_model_is_timed_all_the_same(tmp_path: Path) -> None:
    model, runs = write_tiny(tmp_path / "model", Tiny(vocab=SHAPE.vocab)), list[Run]()
    serve(model, CODECS["hack-paper"], [[5] * 200], 4, 1, lambda _, run: runs.append(run))
    assert 0 < runs[0].wire_bytes < runs[0].fp16_bytes
    assert serve_together(model, CODECS["hack-paper"], [[5] * 200, [6] * 199], 4, 1) > 0
