"""The committed stubs are what protos/ says, every message and field of it is documented or named clearly, and
components of the last release can read it."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

from lab.testbed.release import DESCRIPTORS, descriptors, last_release, take_out
from tests.support.kept_protos import broken_promises

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_stubs_match_the_protos(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", tmp_path], check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "pillion" / "v1").iterdir()}
    kept = {p.name: p.read_bytes() for p in (ROOT / "pillion" / "v1").iterdir() if "_pb2" in p.name and p.is_file()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


def released() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())


def test_the_protos_are_compatible_with_the_last_release() -> None:
    assert broken_promises(released(), FileDescriptorSet.FromString(descriptors(ROOT / "protos"))) == []


def test_the_stored_descriptors_match_the_last_release(tmp_path: pathlib.Path) -> None:
    if missing := take_out(last_release(), tmp_path):
        pytest.skip(missing)
    kept = FileDescriptorSet.FromString(descriptors(tmp_path / "protos"))
    assert kept == released(), "run `make release-protos`"


def reserve(message: DescriptorProto) -> None:
    message.reserved_range.add(start=3, end=4)
    message.reserved_name.append("version")
    del message.field[2]


def retype(message: DescriptorProto) -> None:
    message.field[0].type = message.field[0].TYPE_UINT64


def repeat(message: DescriptorProto) -> None:
    message.field[0].label = message.field[0].LABEL_REPEATED


CHANGES: dict[str, tuple[Callable[[DescriptorProto], object], str]] = {
    "renumbered": (lambda hello: setattr(hello.field[0], "number", 9), "protocol = 1 now has 9"),
    "exchanged": (lambda hello: hello.field.sort(key=lambda field: field.number, reverse=True), ""),
    "retyped": (retype, "1 was optional uint32 protocol, and is optional uint64 protocol"),
    "repeated": (repeat, "1 was optional uint32 protocol, and is repeated uint32 protocol"),
    "renamed": (
        lambda hello: setattr(hello.field[1], "name", "x"),
        "2 was optional string component_id, and is optional string x",
    ),
    "removed": (lambda hello: hello.field.pop(), "version = 3 is gone and not reserved"),
    "reserved": (reserve, ""),
    "added": (lambda hello: hello.field.add(name="more", number=4), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_message_is_named(change: str) -> None:
    """Fields may be written in another order, added, and taken away where their numbers are reserved."""
    new = released()
    (hello,) = (one for file in new.file for one in file.message_type if one.name == "Hello")
    alter, said = CHANGES[change]
    alter(hello)
    found = broken_promises(released(), new)
    assert len(found) == bool(said)
    assert "".join(found).endswith(said)
    assert not found or found[0].startswith("pillion.v1.Hello")


def test_a_removed_method_value_or_message_is_named() -> None:
    new = released()
    for file in new.file:
        del file.service[1:]
        for service in file.service:
            service.method[0].server_streaming ^= True
        for enum in file.enum_type:
            del enum.value[1]
        for index, message in enumerate(file.message_type):
            if message.name == "Hello":
                del file.message_type[index]
    found = set(broken_promises(released(), new))
    wanted = {"pillion.v1.Hello is gone", "pillion.v1.FinishReason.FINISH_REASON_STOP = 1 is gone"}
    assert wanted <= found
    for file in released().file:
        for at, service in enumerate(file.service):
            for rpc in service.method[: None if at else 1]:
                assert any(one.startswith(f"pillion.v1.{service.name}.{rpc.name}(") for one in found)


def test_a_reused_reserved_number_is_named() -> None:
    old, new = released(), released()
    for files in (old, new):
        (hello,) = (one for file in files.file for one in file.message_type if one.name == "Hello")
        hello.reserved_range.add(start=4, end=6)
    hello.field.add(name="again", number=5)
    assert broken_promises(old, new) == ["pillion.v1.Hello.again takes 5, which is reserved"]


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_rpcs_are_documented(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\s*(rpc|service) \w+", line):
            assert above.strip().startswith("//"), f"{path.name}: {line.strip()} has no comment"


# Numbers without a unit.
BARE = {
    "values",
    "scores",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprob",
    "weight",
}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_quantities_end_in_their_unit(path: pathlib.Path) -> None:
    for name in re.findall(r"(?:double|float)\s+(\w+)\s*=", path.read_text()):
        assert name.endswith("_ms") or name in {*BARE, "top_logprobs"}, name
