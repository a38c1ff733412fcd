"""The long-range tasks have the right lengths, depend only on the seed, and have the answer once in the prompt."""

from collections.abc import Callable

import numpy as np
import pytest

from measure import tasks
from measure.tasks import Example, Ids, Phrases

WORDS = [f" {a}{b}{c}e" for a in "bdfghkl" for b in "aeiou" for c in "mnprstvz"]
VOCAB = ["<end>", "\ufffd", *WORDS, *map(chr, range(32, 127)), "\n"]
SPECIAL = frozenset({0})


def encode(text: str) -> list[int]:
    """Encode known words as one id each, other text letter by letter."""
    return [VOCAB.index(c, len(WORDS)) for c in text]


@pytest.fixture(scope="module", name="phrases")
def make_phrases() -> Phrases:
    return Phrases.build(encode, VOCAB, SPECIAL)


@pytest.fixture(scope="module", name="filler")
def make_filler() -> Ids:
    """Text of single characters, which contains no word of the tasks."""
    return np.random.default_rng(0).integers(len(WORDS) + 2, len(VOCAB) - 1, 8192)


def occurrences(haystack: Ids, needle: Ids) -> list[int]:
    windows = np.lib.stride_tricks.sliding_window_view(haystack, len(needle))
    return np.flatnonzero((windows == needle).all(1)).tolist()


def test_phrases_draw_no_special_and_no_broken_ids(phrases: Phrases) -> None:
    assert not {0, 1} & set(phrases.any_token.tolist())
    assert len(phrases.words) == len(WORDS)


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="only 0 whole words"):
        Phrases.build(encode, ["<end>", "\ufffd", *["#"] * len(WORDS), *VOCAB[len(WORDS) + 2 :]], SPECIAL)


@pytest.mark.parametrize("distance", [64, 128, 2048])
def test_copy_repeats_at_the_distance(phrases: Phrases, filler: Ids, distance: int) -> None:
    example = tasks.copy(5, phrases, filler, distance, segment=64, cue=8)
    row = tasks.join(example.prompt, example.answer)
    np.testing.assert_array_equal(row[-64:], row[-64 - distance : len(row) - distance])
    np.testing.assert_array_equal(row[-56:], example.answer)


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("seed", range(5))
def test_recall_asks_for_one_stated_pair(phrases: Phrases, filler: Ids, length: int, seed: int) -> None:
    example = tasks.recall(seed, phrases, filler, length)
    assert len(example.prompt) + len(example.answer) == length
    query = example.prompt[-len(phrases.note) - tasks.KEY_WORDS - len(phrases.equals) :]
    told, asked = occurrences(example.prompt, query)
    assert asked == len(example.prompt) - len(query)
    begin = told + len(query)
    np.testing.assert_array_equal(example.prompt[begin : begin + tasks.VALUE_WORDS], example.answer)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_is_told_once_at_its_depth(phrases: Phrases, filler: Ids, depth: float) -> None:
    example = tasks.needle(9, phrases, filler, 1024, depth)
    assert len(example.prompt) + len(example.answer) == 1024
    (place,) = occurrences(example.prompt, example.answer)
    assert abs(place / 1024 - depth) < 0.15


def copy_at(seed: int, phrases: Phrases, filler: Ids, length: int) -> Example:
    return tasks.copy(seed, phrases, filler, length)


@pytest.mark.parametrize("make", [copy_at, tasks.recall, tasks.needle])
def test_the_seed_decides_everything(
    phrases: Phrases, filler: Ids, make: Callable[[int, Phrases, Ids, int], Example]
) -> None:
    one, same, other = (make(seed, phrases, filler, 512) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.prompt, same.prompt)
    np.testing.assert_array_equal(one.answer, same.answer)
    assert not np.array_equal(one.answer, other.answer)


def test_what_cannot_be_built_is_refused(phrases: Phrases, filler: Ids) -> None:
    with pytest.raises(ValueError, match="need 0 < cue < segment <= distance"):
        tasks.copy(0, phrases, filler, distance=32, segment=64)
    with pytest.raises(ValueError, match="filler has 100 tokens"):
        tasks.recall(0, phrases, filler[:100], 1024)
