"""The frequencies of every kind of rotary embedding are those of transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from hackkv.model.rope import KINDS, RopeSource, make_rope

FACTORS = st.floats(1.0, 64.0)
ORIGINAL = {"original_max_position_embeddings": st.integers(64, 16384)}
PARAMETERS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "linear": st.fixed_dictionaries({"factor": FACTORS}),
    "llama3": st.fixed_dictionaries(
        {"factor": FACTORS, "low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(3, 8)},
        optional=ORIGINAL,
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": st.one_of(st.none(), FACTORS)},
        optional={
            **ORIGINAL,
            "beta_fast": st.integers(16, 64),
            "beta_slow": st.integers(1, 4),
            "attention_factor": st.floats(0.5, 2),
            "mscale": st.floats(0.5, 2),
            "mscale_all_dim": st.floats(0.5, 2),
            "truncate": st.booleans(),
        },
    ),
}


class Theirs(RotaryEmbeddingConfigMixin):
    """The configuration that transformers' functions read."""

    def __init__(self, source: RopeSource, kind: str) -> None:
        self.rope_parameters = {**source.parameters, "rope_type": kind}
        self.head_dim = self.hidden_size = source.head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = source.max_positions


@pytest.mark.parametrize("kind", PARAMETERS)
@given(data=st.data())
def test_frequencies_are_those_of_transformers(kind: str, data: st.DataObject) -> None:
    parameters = data.draw(PARAMETERS[kind])
    theta = data.draw(st.sampled_from([1e4, 5e5, 1e6, 12345.0]))
    head_dim, positions = data.draw(st.sampled_from([32, 64, 80, 128])), data.draw(st.sampled_from([2048, 131072]))
    source = RopeSource({**parameters, "rope_theta": theta}, head_dim, positions)
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](Theirs(source, kind))
    ours = make_rope(kind, source)
    assert ours.inv_freq == tuple(inverse.tolist())
    assert ours.scale == scale


def test_the_other_kinds_do_not_stretch() -> None:
    source = RopeSource({"rope_theta": 1e4}, 64, 2048)
    assert KINDS.keys() - PARAMETERS.keys() == {"default", "dynamic"}
    default, dynamic = make_rope("default", source), make_rope("dynamic", source)
    assert default.inv_freq == dynamic.inv_freq
    assert default.inv_freq[0] == default.scale == 1.0
