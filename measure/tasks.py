"""Synthetic long-range tasks: copying, key-value recall, needle questions.

Every task is a pure function of (seed, phrases, filler, length or distance). It gives the token ids of a prompt and of
its one right answer. The trainer of the shipped model and the accuracy harness use the same functions, so a task cannot
drift between the two. Every task embeds its material in `filler`, the ids of real text. It asks for something that
stands only once in the prompt, far from the question: attention over the KV cache is the only way to answer.
Rejected: sentences encoded whole, because the token count of an answer would then depend on the tokenizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Encode = Callable[[str], Sequence[int]]

KEY_WORDS = 2
VALUE_WORDS = 3
SECRET_WORDS = 2
TOKENS_PER_PAIR = 128
"""One key-value pair per so many tokens of context: 8 pairs at 1k, 32 at 4k."""


@dataclass(frozen=True)
class Example:
    """A prompt and the ids that must follow it."""

    prompt: Ids
    answer: Ids


@dataclass(frozen=True)
class Phrases:
    """The connecting texts of the tasks as ids, and the ids from which random material is drawn."""

    any_token: Ids
    words: Ids
    note: Ids
    equals: Ids
    fact: Ids
    question: Ids
    reply: Ids
    verb: Ids
    stop: Ids
    line_end: Ids

    @classmethod
    def build(cls, encode: Encode, vocab: Sequence[str], special: frozenset[int]) -> "Phrases":
        """Make the phrases. `vocab` lists the decoded text of each id; `special` ids are never drawn."""
        usable = [i for i, text in enumerate(vocab) if i not in special and text and "\ufffd" not in text]
        words = [i for i in usable if _is_word(vocab[i])]
        if len(words) < 256:
            raise ValueError(f"vocabulary has only {len(words)} whole words")
        texts = {
            "note": "\n# note:",
            "equals": " =",
            "fact": "\nThe password of the",
            "question": "\nQuestion: What is the password of the",
            "reply": "?\nAnswer: The password of the",
            "verb": " is",
            "stop": ".",
            "line_end": "\n",
        }
        return cls(
            any_token=np.array(usable), words=np.array(words), **{k: np.array(encode(v)) for k, v in texts.items()}
        )


def _is_word(text: str) -> bool:
    """True for a whole lower-case English-looking word with its leading space."""
    return len(text) >= 4 and text[0] == " " and text[1:].isascii() and text[1:].isalpha() and text.islower()


def join(*parts: Ids) -> Ids:
    """The parts one after another."""
    return np.concatenate(parts)


def random_segment(rng: np.random.Generator, phrases: Phrases, length: int) -> Ids:
    """Ids drawn uniformly: nothing but the earlier occurrence predicts them."""
    return rng.choice(phrases.any_token, length)


def random_words(rng: np.random.Generator, phrases: Phrases, count: int) -> Ids:
    """`count` different whole words."""
    return rng.choice(phrases.words, count, replace=False)


def note(phrases: Phrases, key: Ids) -> Ids:
    """`# note: KEY =`, which states a pair if a value follows, and asks for it if none does."""
    return join(phrases.note, key, phrases.equals)


def fact(phrases: Phrases, key: Ids, secret: Ids) -> Ids:
    """`The password of the KEY is SECRET.`"""
    return join(phrases.fact, key, phrases.verb, secret, phrases.stop, phrases.line_end)


def question(phrases: Phrases, key: Ids) -> Ids:
    """The question for `fact`, with the beginning of its answer."""
    return join(phrases.question, key, phrases.reply, key, phrases.verb)


def cut(rng: np.random.Generator, filler: Ids, length: int) -> Ids:
    """A random stretch of `length` tokens of the filler."""
    if len(filler) < length:
        raise ValueError(f"filler has {len(filler)} tokens, {length} are needed")
    start = int(rng.integers(0, len(filler) - length + 1))
    return filler[start : start + length]


def spread(rng: np.random.Generator, text: Ids, items: Sequence[Ids]) -> Ids:
    """`text` with the items, in order, inserted at random places."""
    places = np.sort(rng.integers(0, len(text) + 1, len(items)))
    pieces = np.split(text, places)
    return join(pieces[0], *(part for pair in zip(items, pieces[1:], strict=True) for part in pair))


def copy(seed: int, phrases: Phrases, filler: Ids, distance: int, segment: int = 64, cue: int = 8) -> Example:
    """A random segment, real text, and the first `cue` tokens of the segment again; the rest is the answer.

    `distance` is counted from a token to its repetition.
    """
    if not 0 < cue < segment <= distance:
        raise ValueError(f"need 0 < cue < segment <= distance, got {cue}, {segment}, {distance}")
    rng = np.random.default_rng(seed)
    body = random_segment(rng, phrases, segment)
    head = cut(rng, filler, 32)
    gap = cut(rng, filler, distance - segment)
    return Example(join(head, body, gap, body[:cue]), body[cue:])


def recall(seed: int, phrases: Phrases, filler: Ids, length: int) -> Example:
    """Key-value pairs scattered through real text; the last line asks for one of them.

    Prompt and answer together have `length` tokens. Any pair may be asked for, so the distance varies.
    """
    rng = np.random.default_rng(seed)
    pairs = max(2, length // TOKENS_PER_PAIR)
    keys = random_words(rng, phrases, KEY_WORDS * pairs).reshape(pairs, KEY_WORDS)
    values = [random_words(rng, phrases, VALUE_WORDS) for _ in range(pairs)]
    lines = [join(note(phrases, k), v, phrases.line_end) for k, v in zip(keys, values, strict=True)]
    asked = int(rng.integers(pairs))
    query = note(phrases, keys[asked])
    text = cut(rng, filler, length - VALUE_WORDS - len(query) - sum(map(len, lines)))
    return Example(join(spread(rng, text, lines), query), values[asked])


def needle(seed: int, phrases: Phrases, filler: Ids, length: int, depth: float | None = None) -> Example:
    """One fact inside real text, after a share `depth` of it (random if None), and a question about it at the end."""
    rng = np.random.default_rng(seed)
    key = random_words(rng, phrases, KEY_WORDS)
    secret = random_words(rng, phrases, SECRET_WORDS)
    told, asked = fact(phrases, key, secret), question(phrases, key)
    text = cut(rng, filler, length - len(told) - len(asked) - SECRET_WORDS)
    place = int((rng.random() if depth is None else depth) * len(text))
    return Example(join(text[:place], told, text[place:], asked), secret)
