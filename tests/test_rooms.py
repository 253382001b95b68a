"""Rooms: the table, the page and the tree say the same, the core imports none, and all of them come off."""

from __future__ import annotations

import concurrent.futures
import importlib
import pathlib
import queue
import re
import sys
from collections.abc import Iterator

import pytest

import pillion
from pillion import rooms
from pillion.config import DecodeFlags, KVNodeFlags, refuse_missing_rooms
from pillion.engine.backends.devices import resolve_device
from pillion.engine.models.config_parser import parse_config
from pillion.errors import ConfigError
from pillion.kvstore.memory.domain import open_domain
from pillion.net.rpc import open_channel
from pillion.rooms import ROOMS, Room, Seam, entered, entered_one, require_room
from pillion.speculative_config import parse_speculative_config
from tests.removal import ROOT, TreeTests, files_of, imported_by, module_of, run
from tests.test_structure import PRODUCT, modules

WIDGETS = Seam[int]("widgets")


# Users import the name from `pillion`, and type checkers find it there.
PUBLIC_TYPES = ("pillion imports the room offline",)


def room_of_modules() -> dict[str, str]:
    """The room of each module that is in one."""
    return {module_of(path): room.name for room in ROOMS for path in files_of(room, ROOT) if path.suffix == ".py"}


def test_the_core_imports_no_room_and_a_room_those_that_it_needs() -> None:
    owners = room_of_modules()
    needs = {room.name: {room.name, *room.needs} for room in ROOMS}
    wrong = []
    for module, path in modules(*PRODUCT).items():
        own = owners.get(module)
        used = {owners[name] for name in imported_by(path) if name in owners}
        strangers = used - needs.get(own or "", set())
        wrong += [f"{module} imports the room {name}" for name in sorted(strangers)]
    assert sorted(set(wrong) - set(PUBLIC_TYPES)) == []


def test_no_file_is_in_two_rooms() -> None:
    files = [path for room in ROOMS for path in files_of(room, ROOT)]
    assert len(files) == len(set(files))


def test_a_row_of_the_page_for_each_room_of_the_table() -> None:
    page = (ROOT / "docs" / "rooms.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \|.*\| ([\d,]+) \|[^|]+\|[^|]+\|$", page, re.MULTILINE))
    assert list(rows) == [room.name for room in ROOMS]
    for room in ROOMS:
        own = [ROOT / path for path in files_of(room, ROOT) if not {"tests", "__pycache__"} & set(path.parts)]
        lines = sum(path.read_bytes().count(b"\n") for path in own)
        assert abs(int(rows[room.name].replace(",", "")) / lines - 1) < 0.1, (room.name, lines)


def seam_places() -> dict[str, str]:
    """Where each seam is defined, as ``file.py:NAME``, by its name."""
    defined = r"^([A-Z_]+) = Seam\[.*\]\(\"([a-z._]+)\"\)$"
    return {
        name: f"{path.relative_to(ROOT).as_posix()}:{constant}"
        for path in modules(*PRODUCT).values()
        for constant, name in re.findall(defined, path.read_text(), re.MULTILINE)
    }


def test_the_page_names_every_seam_of_a_room() -> None:
    page, places, missing = (ROOT / "docs" / "rooms.md").read_text(), seam_places(), []
    for room in ROOMS:
        row = next(line for line in page.splitlines() if line.startswith(f"| {room.name} |"))
        if "](#the-seams-of-" in row:
            row = page.partition(f"## The seams of {room.name}\n")[2].partition("\n#")[0]
        entered_at = [name for name in room.entries if not name.startswith("pillion.")]
        missing += [(room.name, places[name]) for name in entered_at if f"`{places[name]}`" not in row]
    assert missing == []


def test_every_entry_is_there_and_is_the_rooms_own() -> None:
    owners = room_of_modules()
    for room in ROOMS:
        for place in room.entries.values():
            module, _, attribute = place.partition(":")
            assert owners[module] == room.name
            assert hasattr(importlib.import_module(module), attribute)


@pytest.fixture
def widgets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Two rooms that enter a widget each; the second one is gone."""
    (tmp_path / "one_widget.py").write_text("WIDGET = 1\n")
    (tmp_path / "broken_widget.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        rooms,
        "ROOMS",
        (
            Room("one", (), {"widgets": "one_widget:WIDGET"}),
            Room("gone", (), {"widgets": "gone_widget.inner:WIDGET"}),
        ),
    )
    return tmp_path


def test_a_room_that_is_gone_is_passed_over(widgets: pathlib.Path) -> None:
    assert entered(WIDGETS) == [1]
    assert entered_one(WIDGETS) == 1
    require_room("one", "--widgets")
    with pytest.raises(ConfigError, match="--gadgets needs the room 'gone'"):
        require_room("gone", "--gadgets")


def test_a_flag_whose_room_is_gone_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 2}')
    guessing = DecodeFlags(speculative_config=config)
    refuse_missing_rooms(guessing)
    monkeypatch.setattr(rooms, "ROOMS", (Room("drafts", (), {"widgets": "gone_widget.inner:WIDGET"}),))
    refuse_missing_rooms(DecodeFlags())
    with pytest.raises(ConfigError, match="--speculative-config needs the room 'drafts'"):
        refuse_missing_rooms(guessing)
    monkeypatch.setattr(rooms, "ROOMS", ())
    with pytest.raises(ConfigError, match="--speculative-config needs the room 'drafts'"):
        refuse_missing_rooms(guessing)


def test_what_only_a_room_understands_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ROOMS", ())
    assert resolve_device(DecodeFlags()) == "cpu"
    with pytest.raises(ConfigError, match="--device cuda needs the room 'GPU'"):
        resolve_device(DecodeFlags(device="cuda"))
    with pytest.raises(ConfigError, match="--kv-device cuda:1 needs the room 'GPU'"):
        open_domain(KVNodeFlags(kv_device="cuda:1"))
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"), 64)
    plain = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 16, **sizes}
    assert parse_config(plain).quantization is None
    with pytest.raises(ConfigError, match="llama: a checkpoint with quantized weights needs the room"):
        parse_config({**plain, "quantization_config": {"quant_method": "awq", "bits": 4}})
    for flags, words in (
        (DecodeFlags(enforce_eager=True), "--enforce-eager needs the room 'GPU'"),
        (DecodeFlags(quantization="int4"), "--quantization needs the room 'quantized checkpoints'"),
        (KVNodeFlags(gpu_memory_utilization=0.5), "--gpu-memory-utilization needs the room 'GPU'"),
        (DecodeFlags(tensor_parallel_size=2), "--tensor-parallel-size needs the room 'ranks'"),
        (DecodeFlags(max_loras=2), "--max-loras needs the room 'adapters'"),
        (KVNodeFlags(lora_file_bytes=1), "--lora-file-bytes needs the room 'adapters'"),
    ):
        with pytest.raises(ConfigError, match=words):
            refuse_missing_rooms(flags)


def test_a_package_that_a_room_lacks_is_no_room_that_is_gone(
    widgets: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "ROOMS", (Room("broken", (), {"widgets": "broken_widget:WIDGET"}),))
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        entered(WIDGETS)
    assert "broken_widget" not in sys.modules


def test_what_needs_a_room_that_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ROOMS", ())
    monkeypatch.delitem(vars(pillion), "LLM", raising=False)
    with pytest.raises(ImportError, match=r"pillion\.LLM needs the room 'offline'"):
        from pillion import LLM  # noqa: F401
    with pytest.raises(ConfigError, match="in-process:there needs the room 'offline'"):
        open_channel("in-process:there")


# Rooms that are taken away together, so that most of the answers and types are asked for once and not for each. That no
# other room imports one of them is seen without them.
TOGETHER = [tuple(room.name for room in ROOMS[first::2]) for first in range(2)]


@pytest.fixture(scope="module")
def removals() -> Iterator[dict[tuple[str, ...], concurrent.futures.Future[str]]]:
    """What became of the rest, by the rooms that went; two trees are tried at a time, for one waits a lot."""
    with TreeTests() as one, TreeTests() as other, concurrent.futures.ThreadPoolExecutor(2) as pool:
        idle = queue.SimpleQueue[TreeTests]()
        idle.put(one)
        idle.put(other)

        def take_away(names: tuple[str, ...]) -> str:
            tests = idle.get()
            try:
                return run(names, tests)
            finally:
                idle.put(tests)

        yield {names: pool.submit(take_away, names) for names in TOGETHER}


@pytest.mark.long
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_every_room_comes_off(
    removals: dict[tuple[str, ...], concurrent.futures.Future[str]], names: tuple[str, ...]
) -> None:
    assert removals[names].result() == ""
