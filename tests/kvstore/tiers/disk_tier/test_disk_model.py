"""Random lives of a disk tier against a dict: what it claims to have can be read, across restarts and damage."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pillion.kvstore.tiers.disk_tier import disk
from pillion.kvstore.tiers.disk_tier.disk import DiskTier, open_disk_tier
from pillion.kvstore.tiers.disk_tier.disk_files import PAGE_BYTES, DiskFolder
from tests.support.disk import BLOCK_BYTES, FILE_BYTES, NAMESPACE, chain, file_of, flip
from tests.support.examples import examples

MAX_BLOCKS = 6
BLOCKS = [*chain(6), *chain(3, 50), *chain(3, 80)]
SOME = st.lists(st.sampled_from(range(len(BLOCKS))), min_size=1, max_size=5)


class DiskLife(RuleBasedStateMachine):
    """``kept`` is the reference: hash -> bytes, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.scratch = tempfile.TemporaryDirectory(prefix="pillion-disk-")
        self.path = Path(self.scratch.name)
        self.kept: dict[bytes, bytes] = {}
        # By a flipped bit that nobody has met yet; and gone, which the next store tells.
        self.damaged: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.writer: ThreadPoolExecutor
        self.tier = self.open()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def open(self) -> DiskTier:
        with mock.patch.object(disk, "ThreadPoolExecutor", self.executor):
            tier: DiskTier = self.do(
                open_disk_tier(
                    DiskFolder(self.path),
                    namespace=NAMESPACE,
                    block_bytes=BLOCK_BYTES,
                    disk_bytes=MAX_BLOCKS * FILE_BYTES,
                )
            )
        return tier

    def executor(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Capture the tier's writing thread, so that a step can wait for its queue."""
        made = ThreadPoolExecutor(threads, name)
        if name == "kv-disk-write":
            self.writer = made
        return made

    def lose(self, block_hash: bytes) -> None:
        del self.kept[block_hash]
        self.damaged.discard(block_hash)
        self.lost.add(block_hash)

    def use(self, block_hash: bytes) -> None:
        self.kept[block_hash] = self.kept.pop(block_hash)

    @rule(which=SOME)
    def store(self, which: list[int]) -> None:
        """One by one, so that the order of removals is defined."""
        for index in which:
            name, data = BLOCKS[index]
            gone = [other.hash for other in self.do(self.tier.store([(name, data)]))]
            if name.hash not in self.kept and len(self.kept) == MAX_BLOCKS:
                self.lose(next(iter(self.kept)))
            self.kept[name.hash] = self.kept.pop(name.hash, bytes(data))
            assert set(gone) == self.lost - {name.hash}
            assert len(gone) == len(set(gone))
            self.lost.clear()

    @rule(which=SOME)
    def load(self, which: list[int]) -> None:
        hashes = list(dict.fromkeys(BLOCKS[index][0].hash for index in which))
        targets = [bytearray(BLOCK_BYTES) for _ in hashes]
        count = self.do(self.tier.load(hashes, [memoryview(target) for target in targets]))
        here = 0
        while here < len(hashes) and hashes[here] in self.kept:
            here += 1
        broken = [n for n, block_hash in enumerate(hashes[:here]) if block_hash in self.damaged]
        assert count == (broken[0] if broken else here)
        for block_hash, target in zip(hashes[:count], targets, strict=False):
            assert target == self.kept[block_hash]
        for n in reversed(range(here)):
            if n not in broken:
                self.use(hashes[n])
        for n in broken:
            self.lose(hashes[n])

    @rule(which=SOME)
    def touch(self, which: list[int]) -> None:
        hashes = list(dict.fromkeys(BLOCKS[index][0].hash for index in which))
        self.tier.touch(hashes)
        for block_hash in hashes:
            if block_hash in self.kept:
                self.use(block_hash)

    @rule(index=st.sampled_from(range(len(BLOCKS))), at=st.integers(0, BLOCK_BYTES - 1))
    def damage(self, index: int, at: int) -> None:
        """Flip a bit of the payload; the header's are found earlier, see the restart's own test."""
        block_hash = BLOCKS[index][0].hash
        if block_hash in self.kept and block_hash not in self.damaged:
            # Stores and touches of before may still be on their way to the file.
            self.do(asyncio.to_thread(self.writer.submit(lambda: None).result))
            file = file_of(self.path, BLOCKS[index][0])
            mtime_ns = file.stat().st_mtime_ns
            flip(file, -1 - at)
            os.utime(file, ns=(mtime_ns, mtime_ns))
            self.damaged.add(block_hash)

    @rule()
    def restart(self) -> None:
        self.do(self.tier.close())
        self.tier = self.open()
        self.lost.clear()

    @invariant()
    def knows_what_it_has(self) -> None:
        assert self.tier.by_use() == list(self.kept), "in the order of use"
        names = [name.hash for name in self.tier.names()]
        assert set(names) == set(self.kept)
        assert len(names) == len(self.kept)
        for name in self.tier.names():
            assert name.parent not in names or names.index(name.parent) < names.index(name.hash)

    def teardown(self) -> None:
        self.do(self.tier.close())
        files = list(self.path.rglob("*.kv*"))
        assert {file.stem for file in files} == {block_hash.hex() for block_hash in self.kept}
        assert sum(-(-file.stat().st_size // PAGE_BYTES) * PAGE_BYTES for file in files) <= MAX_BLOCKS * FILE_BYTES
        self.loop.close()
        self.scratch.cleanup()


DiskLife.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=30)
TestDiskLife = DiskLife.TestCase
