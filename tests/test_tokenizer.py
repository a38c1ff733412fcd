"""Text to ids and back: streamed text equals whole text, stop strings may cross tokens, and errors name the file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from hackkv.errors import CheckpointError, RequestError
from hackkv.tokenizer import BROKEN, Detokenizer, StopMatcher, Tokenizer

WORDS = "the quick brown fox naïve café 日本語 😀 jumps over"


def byte_level() -> Core:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([WORDS] * 4, trainer)
    return core


def sentencepiece_like() -> Core:
    """Llama 2's scheme: pieces with a space mark, bytes for the rest, and a first space that is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁the", "日"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    core = Core(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return core


def save(folder: Path, core: Core, **config: object) -> Path:
    core.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}))
    return folder


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("tok"), request.param()))


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("tok"), byte_level()))


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(data=st.data())
def test_streamed_text_is_the_decoded_whole_for_any_ids(data: st.DataObject, bytes_tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, bytes_tokenizer.vocab_size - 1), max_size=80))
    skip = data.draw(st.booleans())
    assert "".join(stream(bytes_tokenizer, ids, skip)) == bytes_tokenizer.decode(ids, skip)


@pytest.fixture(scope="module")
def adorned_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with added tokens of characters that stand for bytes, of characters that do not, and of both."""
    core = byte_level()
    core.add_special_tokens([AddedToken("<｜a▁b｜>", special=True), AddedToken("é", special=True)])
    core.add_tokens(["two words", "<0x41>", "日x", "Ġ!"])
    return Tokenizer(save(tmp_path_factory.mktemp("tok"), core))


@given(data=st.data())
def test_added_tokens_are_streamed_as_the_library_decodes_them(
    data: st.DataObject, adorned_tokenizer: Tokenizer
) -> None:
    ids = data.draw(st.lists(st.integers(280, adorned_tokenizer.vocab_size) | st.integers(0, 300), max_size=12))
    assert "".join(stream(adorned_tokenizer, ids, skip=False)) == adorned_tokenizer.decode(ids, False)


@given(text=st.text(max_size=60))
def test_streamed_text_is_the_decoded_whole_for_any_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(alphabet="aé日😀 ", max_size=40))
def test_no_delta_shows_half_a_character(text: str, bytes_tokenizer: Tokenizer) -> None:
    assert not any(BROKEN in delta for delta in stream(bytes_tokenizer, bytes_tokenizer.encode(text)))


def test_noise_is_shown_after_a_while_and_stays_equal_to_the_whole(bytes_tokenizer: Tokenizer) -> None:
    noise = bytes_tokenizer.encode("é")[:1] * 100 + bytes_tokenizer.encode("x😀y")
    deltas = stream(bytes_tokenizer, noise)
    assert any(deltas[:60])
    assert "".join(deltas) == bytes_tokenizer.decode(noise)


@given(data=st.data())
def test_matcher_cuts_before_the_first_stop_however_the_text_arrives(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab.", max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops)
    shown = ""
    for index, piece in enumerate(pieces):
        shown += matcher.push(piece)
        if matcher.matched is None:  # text is held back only if it can become a stop string
            held = "".join(pieces[: index + 1])[len(shown) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    shown += matcher.release()
    positions = [at for stop in stops if (at := text.find(stop)) >= 0]
    if matcher.matched is None:
        assert not positions
        assert shown == text
    else:
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert text.startswith(shown)
        assert text[len(shown) :].startswith(matcher.matched)
        assert len(shown) >= min(positions)
        assert len(shown) <= min(ends)


def test_token_bytes_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "日 é"
    data = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))
    assert data.strip() == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_special_tokens_are_named_and_skipped(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id is not None
    assert tokenizer.token_text(tokenizer.bos_id) == "<s>"
    assert stream(tokenizer, [tokenizer.bos_id]) == ["", ""]
    assert "".join(stream(tokenizer, [tokenizer.bos_id], skip=False)) == "<s>"


def test_the_chat_template_is_the_checkpoints_own(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "[user]hi>"
    assert tokenizer.decode(tokenizer.chat(messages, add_generation_prompt=False)) == "[user]hi"


def test_without_or_against_a_chat_template_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(RequestError, match="no chat template") as caught:
        Tokenizer(save(tmp_path / "a", byte_level())).chat([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"
    refusing = Tokenizer(
        save(tmp_path / "b", byte_level(), chat_template="{{ raise_exception('roles must alternate') }}")
    )
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.chat([{"role": "user", "content": "hi"}])


def test_the_training_runs_padding_and_truncation_are_off(tmp_path: Path) -> None:
    core = byte_level()
    core.enable_truncation(3)
    core.enable_padding(length=10)
    assert len(Tokenizer(save(tmp_path, core)).encode("xyzxyz")) == 6


def test_the_models_vocabulary_counts_if_it_is_known(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    assert Tokenizer(tmp_path).vocab_size == 300
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    assert Tokenizer(tmp_path).vocab_size == 512


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "tokenizer.json"),
        ({"config.json": "{"}, "config.json"),
    ],
)
def test_a_bad_folder_is_an_error_that_names_the_file(tmp_path: Path, files: dict[str, str], named: str) -> None:
    if "config.json" in files:
        save(tmp_path, byte_level())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=named):
        Tokenizer(tmp_path)


def test_no_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Tokenizer(tmp_path / "nowhere")


def test_the_router_does_not_load_torch() -> None:
    code = "import sys, router.service, hackkv.tokenizer; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_threads_run_while_a_long_text_is_encoded(bytes_tokenizer: Tokenizer) -> None:
    done = threading.Event()

    def encode() -> None:
        bytes_tokenizer.encode("over the lazy dog 12 " * 20_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20, "a tokenizer that keeps the interpreter's lock leaves a few before it begins"
