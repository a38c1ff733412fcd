"""tokenizer.json and tokenizer_config.json of a GGUF file, built with the `tokenizers` library.

transformers builds tokenizers from GGUF files too. Where it does not know `tokenizer.ggml.pre`, it splits text as GPT-2
does before it merges. Then SmolLM2 gets other tokens than it was trained on; "at  2" is an example. Here a name that is
not in the table is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer
from transformers.tokenization_utils_base import generate_merges

from hackkv.errors import CheckpointError
from hackkv.model.gguf.header import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` that are not plain pieces of text."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The rules by which text is cut before pieces are merged: one value of `tokenizer.ggml.pre`."""

    regex: str = ""
    """Cuts as this says; empty means GPT-2's cuts."""
    digits: bool = False
    """Cuts every digit off first."""
    whole_words: bool = False
    """A cut that is a token by itself stays whole, whatever the merges say."""
    begins: bool = False
    """Whether a text begins with BOS where `tokenizer.ggml.add_bos_token` is missing."""

    def build(self) -> PreTokenizer:
        """The library's pre-tokenizer for these rules."""
        if self.digits:
            last = pre_tokenizers.ByteLevel(add_prefix_space=False)
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), last])
        if not self.regex:
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        split = pre_tokenizers.Split(Regex(self.regex), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_OF_LLAMA3 = Splitting(_LLAMA3, whole_words=True, begins=True)
_OF_GPT2 = Splitting()
SPLITTINGS = {
    "default": _OF_GPT2,
    "gpt-2": _OF_GPT2,
    "smollm": Splitting(digits=True),
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "tekken": Splitting(_TEKKEN, whole_words=True, begins=True),
    "qwen2": Splitting(_QWEN2),
    "deepseek-r1-qwen": Splitting(_QWEN2, begins=True),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of a file."""

    core: Tokenizer
    config: dict[str, Any]
    """tokenizer_config.json, chat template included."""


def vocabulary_of(header: GgufHeader) -> Vocabulary:
    """The tokenizer that `header` describes.

    Raises `CheckpointError` that names the file and the field: a kind of tokenizer or a splitting that is not in the
    tables, lists of different lengths, merges of tokens that are not there.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.fail("tokenizer.ggml.model", f"{kind!r} is not one of gpt2, llama")
    tokens = _strings(header, "tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise header.fail("tokenizer.ggml.tokens", f"{len(tokens) - len(ids)} tokens come twice")
    rows = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    if not 0 < len(tokens) <= rows:
        raise header.fail("tokenizer.ggml.tokens", f"{len(tokens)} tokens, but token_embd.weight has {rows} rows")
    try:
        core, begins = _byte_level(header, ids) if kind == "gpt2" else _sentencepiece(header, ids, tokens)
    except CheckpointError:
        raise
    except Exception as error:
        # The Rust side raises bare Exception; all of them mean pieces and merges that do not fit together.
        raise header.fail("tokenizer.ggml", f"no tokenizer can be made of it: {error}") from error
    names = {name: _token(header, tokens, f"{name}_id") for name in ("bos_token", "eos_token")}
    _add_marked(header, core, tokens, {name for name in names.values() if name})
    core.post_processor = _around(header, ids, names, begins)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in names.items() if token is not None},
    }
    if (template := header.metadata.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise header.fail("tokenizer.chat_template", "expected text")
        config["chat_template"] = template
    return Vocabulary(core, config)


def _byte_level(header: GgufHeader, ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise header.fail("tokenizer.ggml.pre", f"{name!r} is not one of {', '.join(SPLITTINGS)}")
    splitting = SPLITTINGS[name]
    core = Tokenizer(models.BPE(vocab=ids, merges=_merges(header), ignore_merges=splitting.whole_words))
    core.pre_tokenizer = splitting.build()
    core.decoder = decoders.ByteLevel()
    return core, splitting.begins


def _sentencepiece(header: GgufHeader, ids: dict[str, int], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Llama 2's scheme: pieces with a mark for the space, bytes for the rest; merges follow from the scores."""
    if "tokenizer.ggml.merges" in header.metadata:
        merges = _merges(header)
    else:
        scores = header.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise header.fail("tokenizer.ggml.scores", "expected one number for each token")
        merges = generate_merges(ids, dict(zip(tokens, scores, strict=True)))
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    unk_token = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    core = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unk_token))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return core, True


def _add_marked(header: GgufHeader, core: Tokenizer, tokens: list[str], special: set[str]) -> None:
    """Keep tokens whole that the file marks: control tokens, and those that its maker added."""
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or (kinds and len(kinds) != len(tokens)):
        raise header.fail("tokenizer.ggml.token_type", "expected one number for each token")
    control = {token for token, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL)} | special
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens if t in control])
    added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED and token not in control]
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])


def _around(
    header: GgufHeader, ids: dict[str, int], names: dict[str, str | None], begins: bool
) -> processors.TemplateProcessing | None:
    """The processor that puts BOS and EOS around a text; None where the file wants neither."""
    first = names["bos_token"] if header.metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    last = names["eos_token"] if header.metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (first, last) if token is not None]
    if not around:
        return None
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    return processors.TemplateProcessing(single=single, special_tokens=[(t, ids[t]) for t in dict.fromkeys(around)])


def _strings(header: GgufHeader, name: str) -> list[str]:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise header.fail(f"tokenizer.ggml.{name}", "expected a list of texts")
    return value


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges = list[tuple[str, str]]()
    for merge in _strings(header, "merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def _token(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    index = header.metadata.get(f"tokenizer.ggml.{name}")
    if index is None:
        return None
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tokens):
        raise header.fail(f"tokenizer.ggml.{name}", f"{index!r} is no id of a token")
    return tokens[index]
