"""The committed protobuf code is what protoc makes of kv.proto, and the method paths are its methods."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hackkv import nodes, types
from transport import methods
from transport.pb import kv_pb2 as pb

ROOT = Path(__file__).parents[2]
PROTO = "transport/pb/kv.proto"


@pytest.mark.parametrize("name", ["kv_pb2.py", "kv_pb2.pyi", "kv_pb2_grpc.py"])
def test_generated_code_is_current(name: str, tmp_path: Path) -> None:
    """protoc runs in another process: protoc and NIXL bring different versions of protobuf."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outputs, str(ROOT / PROTO)], check=True)
    fresh = tmp_path / "transport" / "pb" / name
    assert (ROOT / "transport" / "pb" / name).read_text() == fresh.read_text(), "run `make proto`"


def test_method_paths_are_those_of_the_proto() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    assert set(methods.ALL) == {f"/{service.full_name}/{m.name}" for service in services for m in service.methods}


LOCAL_NOUNS = {"Busiest", "KvShape", "NodeIdentity"}
"""Nouns that never leave a process by themselves."""
LOCAL_FIELDS = {("KvFrame", "header_bytes")}
"""Fields that each end fills in by itself."""


def test_every_field_of_every_noun_is_in_the_proto() -> None:
    known = {**vars(types), **vars(nodes)}.items()
    nouns = {name: noun for name, noun in known if isinstance(noun, type) and dataclasses.is_dataclass(noun)}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        if noun := nouns.get(name):
            names = [field.name for field in dataclasses.fields(noun)]
            sent = [field for field in names if (name, field) not in LOCAL_FIELDS]
            assert sent == [field.name for field in message.fields]
    assert nouns.keys() - pb.DESCRIPTOR.message_types_by_name.keys() == LOCAL_NOUNS
