"""A checkpoint's defaults are read, checked, and kept apart from the values that a client sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from hackkv.errors import CheckpointError
from router.api.defaults import SamplingDefaults, read_sampling_defaults
from router.api.sampling import sampling_of
from router.api.schema import CompletionRequest


def test_proposals_are_read_and_silence_means_openais_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 1}'
    (tmp_path / "generation_config.json").write_text(text)
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [('{"top_p": 2}', "top_p"), ("[]", "expected a JSON object"), ("{", "cannot be read as JSON")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config.json: .*{complaint}"):
        read_sampling_defaults(tmp_path)


def test_the_client_wins_over_the_checkpoint() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9)
    body = CompletionRequest.model_validate({"prompt": "x", "temperature": 0, "top_k": -1, "top_p": None})
    sampling = sampling_of(body, defaults, 5, None, None)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.9)
