"""`python -m tools.lock`, or `make lock`: pins the newest packages that pyproject.toml admits in constraints.txt.

So checks and tests give the same results tomorrow as today. The Makefile pins torch, which brings Triton and CUDA's
packages in versions that depend on the build of torch.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
OF_TORCH: Final = re.compile("(torch|triton|cuda|nvidia)([-_].*)?")


def main() -> None:
    """Write the file. If pip reports a conflict, the command ends with its message."""
    torch = re.search("^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch, "the Makefile pins torch"
    resolve = ("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-")
    command = (sys.executable, "-m", "pip", *resolve, torch[1], "--editable", ".[dev]")
    found = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    packages = [item["metadata"] for item in found["install"] if "dir_info" not in item["download_info"]]
    pins = sorted(f"{each['name']}=={each['version']}" for each in packages if not OF_TORCH.fullmatch(each["name"]))
    head = "# Written by `make lock`: the packages that checks and tests ran with.\n"
    (ROOT / "constraints.txt").write_text(head + "\n".join(pins) + "\n")
    print(f"constraints.txt pins {len(pins)} packages")


if __name__ == "__main__":
    main()
