"""Copying of adapter files: once to each node whose machine lacks them, and again to new nodes."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pillion.engine.adapters.adapter_files import AdapterFiles
from pillion.engine.adapters.adapter_store import AdapterStore
from pillion.errors import Overloaded, Unavailable
from pillion.gateway.adapters import adapter_spread
from pillion.gateway.adapters.adapter_spread import AdapterSpread
from pillion.host.adapter_folders import ADAPTER_FILES, ADAPTERS
from pillion.kvstore.adapters.adapter_pieces import open_files, pieces_of
from pillion.v1.kvnode_pb2 import AdapterPiece
from tests.support.adapters import make_adapter
from tests.support.families import FAMILIES, make_model

OURS, OTHERS = "ab" * 32, "cd" * 32


class FakeNodeClient:
    """A node whose machine has ``kept`` adapters; if ``full`` it refuses more."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.asked = 0
        self.full = False

    async def missing_adapters(self, digests: Sequence[str]) -> Sequence[str]:
        self.asked += 1
        return [digest for digest in digests if digest not in self.kept]

    async def keep_adapter(self, pieces: AsyncGenerator[AdapterPiece, None], timeout_s: float) -> None:
        found = [piece async for piece in pieces]
        assert [piece.data for piece in found if piece.data] == [name.encode() for name in ADAPTER_FILES]
        if self.full:
            raise Overloaded("full")
        self.kept.append(found[0].digest)


def link(name: str) -> Any:
    return SimpleNamespace(node_id=name, alive=True, epoch=1, client=FakeNodeClient())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> SimpleNamespace:
    """Return a clock and a model cache that contains OURS alone."""
    monkeypatch.setenv("PILLION_CACHE", str(tmp_path))
    folder = tmp_path / ADAPTERS / OURS
    folder.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (folder / name).write_text(name)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(adapter_spread, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


async def test_each_node_gets_each_adapter_once(clock: SimpleNamespace) -> None:
    nodes, names = [link("a"), link("b")], {OURS}
    nodes[1].alive = False
    spread = AdapterSpread(lambda: nodes, lambda: names, AdapterStore())
    for _ in range(3):
        await spread.spread()
    assert (nodes[0].client.kept, nodes[0].client.asked) == ([OURS], 1)
    assert nodes[1].client.asked == 0
    nodes[1].alive = True
    await spread.spread()
    assert nodes[1].client.kept == [OURS]
    # New session: the node may have moved to another machine.
    nodes[0].epoch, nodes[0].client.kept = 2, []
    await spread.spread()
    assert nodes[0].client.kept == [OURS]
    clock.now += adapter_spread.ASK_AGAIN_S
    await spread.spread()
    assert [node.client.asked for node in nodes] == [3, 2]


async def test_copies_that_fail_or_wait_for_another_gateway_are_retried(clock: SimpleNamespace) -> None:
    nodes = [link("a")]
    spread = AdapterSpread(lambda: nodes, lambda: {OTHERS}, AdapterStore())
    for _ in range(2):
        await spread.spread()
    assert nodes[0].client.asked == 1
    clock.now += adapter_spread.RETRY_S
    await spread.spread()
    assert (nodes[0].client.asked, nodes[0].client.kept) == (2, [])
    nodes[0].client.full = True
    spread = AdapterSpread(lambda: nodes, lambda: {OURS}, AdapterStore())
    await spread.spread()
    nodes[0].client.full = False
    clock.now += adapter_spread.RETRY_S
    await spread.spread()
    assert nodes[0].client.kept == [OURS]


async def test_a_gateway_fetches_adapters_that_its_machine_lacks(
    clock: SimpleNamespace, tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Start with an empty cache, the loading gateway gone and one of two nodes failing."""
    model = make_model(tmp_path_factory.mktemp("model"), FAMILIES["llama-gqa-tied"])[0]
    source = make_adapter(model, tmp_path / "source", r=4, target_modules=["q_proj"])
    digest, broken, node, asked = AdapterFiles(source).digest(), link("a"), link("b"), []

    async def read_adapter(wanted: str, timeout_s: float) -> AsyncGenerator[AdapterPiece, None]:
        asked.append(wanted)
        if len(asked) == 1:
            raise Overloaded("busy")
        async for piece in pieces_of(open_files(source)):
            yield piece

    async def break_off(wanted: str, timeout_s: float) -> AsyncGenerator[AdapterPiece, None]:
        async for piece in pieces_of(open_files(source)):
            yield piece
            raise Unavailable("lost")

    broken.client.read_adapter, node.client.read_adapter = break_off, read_adapter
    spread = AdapterSpread(lambda: [broken, node], lambda: {OURS, digest}, AdapterStore())
    for _ in range(2):
        await spread.fetch()
    assert asked == [digest]
    clock.now += adapter_spread.RETRY_S
    for _ in range(2):
        await spread.fetch()
    assert asked == [digest] * 2
    assert AdapterFiles(tmp_path / ADAPTERS / digest).digest() == digest
