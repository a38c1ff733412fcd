"""The moment at which freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hackkv.heap import IDLE_S, IdleTrim, unwritten_files

BUSY, REST = 2 * IDLE_S, IDLE_S / 2


@pytest.mark.parametrize(
    ("used", "trims"),
    [
        ((REST,), 1),  # it gives back what it used to load
        ((REST, REST, REST), 1),
        ((BUSY,), 0),
        ((BUSY, BUSY, REST, REST), 1),
        ((REST, BUSY, REST), 2),
        ((REST, BUSY, BUSY, REST, REST, BUSY, REST), 3),
    ],
)
async def test_a_process_trims_once_when_it_has_become_idle(used: tuple[float, ...], trims: int) -> None:
    """`used` has the seconds of processor time between looks. Trimming takes time too, but does not count as work."""
    clock, count = 0.0, 0

    def trim() -> None:
        nonlocal clock, count
        clock, count = clock + BUSY, count + 1

    idle = IdleTrim(trim, lambda: clock)
    for seconds in used:
        clock += seconds
        await idle.look()
    assert count == trims


SMAPS = """\
00400000-00401000 r--p 00000000 fd:00 17                                 /usr/lib/lib with a space.so
Size:                  4 kB
Anonymous:             0 kB
00401000-00405000 r-xp 00001000 fd:00 17                                 /usr/lib/lib with a space.so
Anonymous:             0 kB
00405000-00406000 r--p 00005000 fd:00 17                                 /usr/lib/lib with a space.so
Anonymous:             4 kB
00406000-00407000 rw-p 00006000 fd:00 17                                 /usr/lib/lib with a space.so
Anonymous:             0 kB
00500000-00600000 rw-p 00000000 00:00 0                                  [heap]
Anonymous:             0 kB
7f0000000000-7f0000001000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000002000-7f0000003000 r--p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_what_equals_its_file_is_unmapped() -> None:
    """Ranges that the loader has written, that may be written, or that belong to no file stay."""
    assert list(unwritten_files(SMAPS.splitlines(keepends=True))) == [(0x400000, 0x401000), (0x401000, 0x405000)]


UNMAPS = """
import ctypes, mmap, sys
from hackkv.heap import unmap_code, unwritten_files

SIZE = 1 << 22
with open(sys.argv[1], "r+b") as file:
    plain = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ)
    changed = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
changed[:1] = b"!"
at = ctypes.addressof(ctypes.c_char.from_buffer(changed))
assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(SIZE), mmap.PROT_READ)

def resident():
    sizes, ours = [], False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            ours = line.rstrip().endswith(sys.argv[1])
        elif ours and line.startswith("Rss:"):
            sizes.append(int(line.split()[1]) << 10)
    return sum(sizes)

assert plain[:] == bytes(SIZE) and changed[1:] == bytes(SIZE - 1)
before = resident()
unmap_code()
print(before // SIZE, resident() // SIZE)
assert plain[:] == bytes(SIZE), "it comes from the file again"
assert changed[:2] == b"!" + bytes(1), "a page that differs from the file stays as it is"
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="only Linux tells what is mapped")
def test_unmapped_code_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(bytes(1 << 22))
    command = [sys.executable, "-c", UNMAPS, str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0)
    assert told.stdout.split() == ["2", "1"], "times the size of the file: before and after"
