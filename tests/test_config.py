"""Configuration files and flags: errors name the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hackkv.config import CodecConfig, Frozen, ListenConfig, ModelConfig, load
from hackkv.errors import ConfigError


class Role(Frozen):
    """A role's configuration, built like the real ones."""

    model: ModelConfig = ModelConfig()
    codec: CodecConfig = CodecConfig()
    listen: ListenConfig = ListenConfig()
    num_pages: int = 16
    optional: ListenConfig | None = None


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "role.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_defaults_need_no_file() -> None:
    role = load(Role, None)
    assert role == Role()
    assert role.listen.host == "127.0.0.1"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert load(Role, write(tmp_path, text)) == Role()


def test_flags_win_over_the_file_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, "codec: {name: fp16, settings: {page_tokens: 32}}\nlisten: {port: 80}\nnum_pages: 3\n")
    role = load(Role, path, {"codec.name": "hack", "listen.host": "::1", "model.dtype": "float32"})
    assert role.codec == CodecConfig(name="hack", settings={"page_tokens": 32})
    assert (role.listen.host, role.listen.port, role.model.dtype, role.num_pages) == ("::1", 80, "float32", 3)


def test_settings_keep_their_types(tmp_path: Path) -> None:
    path = write(tmp_path, "codec: {settings: {stored_sums: false, k_bits: 4, rounding: nearest}}")
    settings = load(Role, path).codec.settings
    assert [type(value) for value in settings.values()] == [bool, int, str]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("num_pagse: 3", "num_pagse: there is no such setting; did you mean num_pages?"),
        ("lisen: {port: 3}", "lisen: there is no such setting; did you mean listen?"),
        ("optional: {prot: 3}", "optional.prot: there is no such setting; did you mean optional.port?"),
        ("listen: {port: 70000}", "listen.port"),
        ("listen: {hots: x}", "listen.hots: there is no such setting; did you mean listen.host?"),
        ("listen:\n", "listen"),
        ("num_pages: many", "num_pages"),
        ("codec: {settings: {k_bits: [2]}}", "codec.settings.k_bits"),
        ("[1, 2]", "expected a mapping of settings, found list"),
        ("just words", "found str"),
        ("a: b: c", "mapping values are not allowed"),
        ("2: x", "2"),
        ("num_pages: 2026-13-01", "month must be in 1..12"),
        (b"\xff\xfe\x00", "role.yaml"),
        (b"num_pages: \xe9", "utf-8"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str | bytes, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(Role, path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(Role, tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"listen.prot": 1}, "flags: listen.prot: there is no such setting; did you mean listen.port?"),
        ({"num_pages": 1, "num_pages.x": 2}, "flags: num_pages.x: num_pages is not a section"),
    ],
)
def test_what_is_wrong_in_a_flag_is_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Role, None, overrides)
    assert named in str(caught.value)


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Role().num_pages = 3
