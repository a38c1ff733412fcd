"""Peers as processes: the remaining work, the section of the page, and the names of absent peers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.peers import process
from bench.peers.beside import Part, Record, section
from bench.peers.model import WEIGHTS, text_prompts, write_split
from bench.peers.process import Absent, compile_hold, python_of, run
from bench.peers.systems.child import Answer, Job, Result
from bench.peers.table import ENTRIES, Entry
from hackkv.model.config import read_spec
from hackkv.model.layout import fused_parts
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.packaged import SHIPPED

OURS = Entry("ours", "hackkv", ("codes", "fp16"), "small", 4, ours=True)
QUICK = Entry("quick", "quick", ("f16", "u8"), "small", 4)
SLOW = Entry("slow", "slow", ("f16",), "small", 4)
WIDE = Entry("wide", "wide", ("f16",), "wide", 16)
ALL = (OURS, QUICK, SLOW, WIDE)
SETTING = {"requests": "some", "model": "m", "machine": "here", "kernels": "avx2", "held": "", "at once": 8}
LENGTHS = (512, 4096)


def alone(*seconds: float) -> Result:
    """A result whose prefills take `seconds`, and whose decode takes as many milliseconds per token."""
    return Result("1.0", [Answer(each, each * 63 / 1e3) for each in seconds])


def together(seconds: float) -> Result:
    return Result("1.0", together_s=seconds)


def measured() -> Record:
    record = Record(SETTING, LENGTHS)
    for entry, kv, seconds in (
        (OURS, "codes", 2.0),
        (OURS, "fp16", 4.0),
        (QUICK, "f16", 10.0),
        (QUICK, "u8", 8.0),
        (SLOW, "f16", 20.0),
        (WIDE, "f16", 5.0),
    ):
        record.add(Part(entry, kv, together=False), alone(1.0, seconds))
    return record


def keys(record: Record, rounds: int = 1, contenders: int = 2) -> list[str]:
    return [part.key for part in record.left(ALL, rounds, contenders)]


def test_all_is_left_at_first_and_each_part_is_done_once() -> None:
    record = Record(SETTING, LENGTHS)
    assert keys(record)[:4] == ["ours, KV codes", "ours, KV fp16", "quick, KV f16", "quick, KV u8"]
    record.add(Part(OURS, "codes", together=False), alone(1.0, 2.0))
    record.absent["ours, KV fp16"] = "broken"
    assert keys(record)[0] == "quick, KV f16"
    assert "ours, KV codes" in keys(record, rounds=2)


def test_the_fastest_peers_are_asked_for_all_at_once_in_a_setting_that_they_can() -> None:
    record = measured()
    ours = ["ours, KV codes, together", "ours, KV fp16, together"]
    assert keys(record) == [*ours, "wide, KV f16, together", "quick, KV u8, together"]
    record.absent["quick, KV u8, together"] = "it stopped"
    assert keys(record)[2:] == ["wide, KV f16, together", "quick, KV f16, together"]


def test_a_record_goes_on_only_for_the_same_setting() -> None:
    record = measured()
    record.absent["slow, KV f16, together"] = "no"
    kept = json.loads(json.dumps(record.as_json()))
    assert Record.read(kept, SETTING, LENGTHS) == record
    kept["absent"]["wide, KV f16, together"] = process.NOT_INSTALLED
    assert Record.read(kept, SETTING, LENGTHS) == record
    assert not Record.read(kept, {**SETTING, "kernels": "avx512-vnni"}, LENGTHS).results


def test_ratios_are_to_the_fastest_peer_in_each_respect() -> None:
    """Decode is compared at equal bits, so another peer is the fastest one there."""
    record = measured()
    record.add(Part(OURS, "codes", together=True), together(30.0))
    record.add(Part(WIDE, "f16", together=True), together(60.0))
    record.absent["slow, KV f16, together"] = "it stopped"
    text = section(record, ALL, 0.5)
    for line in (
        "| ours | codes | 1.00 | 2.00 | 1.0 | 2.0 | 2.13 | 30.0 | 1 |",
        "| JCT of 4096 + 64 | wide, KV f16 | 0.40 | 0.80 | ≤ 0.6 |",
        "| prefill of 4096 | wide, KV f16 | 0.40 | 0.80 | ≤ 0.8 |",
        "| decode at 4096, equal weight bits | quick, KV u8 | 0.25 | 0.50 | ≤ 0.8 |",
        "| 8 at once | wide, KV f16 | 0.50 |  | ≤ 0.5 |",
        "- slow, KV f16, together: **not measured**: it stopped",
    ):
        assert line in text


def job(gguf: str) -> Job:
    return Job(gguf, "", "", "fp16", 1, 2, [[5] * 40], together=False)


def test_a_peer_that_is_not_installed_or_fails_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PEERS", tmp_path)
    with pytest.raises(Absent, match="make peers"):
        python_of(QUICK)
    with pytest.raises(Absent, match="cannot be held"):
        run(replace(OURS, held=""), job(""), tmp_path, 60.0)
    with pytest.raises(Absent, match=r"No module named bench\.peers\.systems\.quick"):
        run(replace(QUICK, ours=True), job(""), None, 60.0)


def test_every_peer_has_a_module_and_pinned_packages() -> None:
    systems = Path(process.__file__).with_name("systems")
    for entry in ENTRIES:
        assert (systems / f"{entry.module}.py").is_file()
        pins = systems.with_name("requirements") / f"{entry.module}.txt"
        lines = [] if entry.ours else pins.read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith(("#", "--no-binary"))), entry
    assert len({entry.module for entry in ENTRIES}) == len(ENTRIES)


def test_a_held_process_sees_no_newer_instructions(tmp_path: Path) -> None:
    """This also holds for a process that handles the same signal. A fault of its own still ends it."""
    try:
        shown = process.environment(1, compile_hold(tmp_path))
    except Absent as error:
        pytest.skip(str(error))
    asks = "from hack_kernels.cpu.extension import supported_isas; print(supported_isas()[0])"
    command = [sys.executable, "-X", "faulthandler", "-c"]
    done = subprocess.run([*command, asks], env=shown, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "avx2"
    died = subprocess.run([*command, "import ctypes; ctypes.string_at(0)"], env=shown, check=False)
    assert died.returncode == -signal.SIGSEGV


def test_a_fused_checkpoint_is_split_for_others(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", Tiny())
    split = load_file(source / WEIGHTS)
    parts = fused_parts(read_spec(source))
    fused = {name: torch.cat([split[part] for part in each]) for name, each in parts.items()}
    assert len(fused) < len(split)
    save_file(fused, source / WEIGHTS)
    back = load_file(write_split(source, tmp_path / "back") / WEIGHTS)
    assert back.keys() == split.keys()
    assert all(torch.equal(back[name], split[name]) for name in split)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_prompts_of_text_are_the_same_each_time() -> None:
    prompts = text_prompts(SHIPPED, [40, 60])
    assert prompts == text_prompts(SHIPPED, [40, 60])
    assert [len(prompt) for prompt in prompts] == [40, 60]
