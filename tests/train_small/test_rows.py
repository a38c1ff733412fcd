"""Training rows: their length, and that tokens with weight in the loss follow from the tokens before them."""

import numpy as np
import pytest

from measure.tasks import Phrases
from tools.train_small import rows
from tools.train_small.rows import Material

WORDS = [f" {a}{b}{c}e" for a in "bdfghkl" for b in "aeiou" for c in "mnprstvz"]
VOCAB = [*WORDS, *map(chr, range(32, 127)), "\n"]


def encode(text: str) -> list[int]:
    """Ids of a text, one for each letter."""
    return [VOCAB.index(c, len(WORDS)) for c in text]


@pytest.fixture(scope="module", name="material")
def make_material() -> Material:
    text = np.random.default_rng(0).integers(len(WORDS), len(VOCAB), 20000)
    return Material(text, Phrases.build(encode, VOCAB, frozenset()), encode)


@pytest.mark.parametrize("kind", ["text", "copy", "recall", "needle", "chat"])
@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_a_row_has_its_length(material: Material, kind: str, length: int) -> None:
    for seed in range(10):
        ids, weights = rows.make_row(np.random.default_rng(seed), material, kind, length)
        assert len(ids) == len(weights) == length
        assert weights.sum() > 0


@pytest.mark.parametrize("kind", ["recall", "needle"])
def test_what_is_recalled_was_told_before(material: Material, kind: str) -> None:
    for seed in range(10):
        ids, weights = rows.make_row(np.random.default_rng(seed), material, kind, 1024)
        recalled = np.flatnonzero((weights == rows.RECALL_WEIGHT) & (ids < len(WORDS)))
        assert len(recalled)
        for place in recalled.tolist():
            assert ids[place] in ids[:place][weights[:place] == 0]


def test_a_batch_stacks_rows_of_the_mix(material: Material) -> None:
    mix = {"text": 1.0, "copy": 0.0}
    ids, weights = rows.batch(np.random.default_rng(0), material, mix, 256, 8)
    assert ids.shape == weights.shape == (8, 256)
    assert (weights == 1).all()
