"""docker-compose.yml and the image agree. `make compose-test` tests that they work."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_the_image_gets_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {package.partition("/")[0] for package in project["tool"]["scikit-build"]["wheel"]["packages"]}
    copied = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").split("\n")
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    for folder in sorted(folders):
        assert f"COPY {folder} {folder}" in copied
        assert f"!{folder}" in sent


@pytest.mark.parametrize("node", NODES)
def test_a_nodes_health_check_reads_the_configuration_that_the_node_runs_with(node: str) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"][node]
    (config,) = (argument for argument in service["entrypoint"] if argument.startswith("--config="))
    assert config in service["healthcheck"]["test"]
    assert (ROOT / "deploy/config" / Path(config).name).is_file()
