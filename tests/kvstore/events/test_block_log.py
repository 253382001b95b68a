"""Followers of a pool whose node is killed, whose log is truncated and whose connections break: at any time a mirror is
the pool after the change that it names, and the ledger once it has caught up."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pillion.errors import Internal, InvalidRequest, Overloaded
from pillion.kvstore.events import block_log
from pillion.kvstore.events.block_log import BlockLog, FollowerStream, to_runs
from pillion.kvstore.events.block_mirror import BlockChange, BlockMirror
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.v1.kvnode_pb2 import BlockChanges, PoolFacts
from tests.support.examples import examples
from tests.support.node_lives import parents_of
from tests.support.surviving_node import MortalLives, SurvivingNode, random_act

# Small, so that snapshots have several parts and followers are left behind.
MESSAGE_BLOCKS, LOG_CHANGES = 2, 7
FACTS = PoolFacts(node_id="kv", kv_namespace=b"n" * 32, block_tokens=1)
A, B, C, D = split_hashes(chain_hashes(bytes(32), [1, 2, 3, 4], 1))


class LoggedNode(SurvivingNode):
    """A node over all its lives, with each life's log and the pool after each change."""

    def begin(self) -> None:
        self.log = BlockLog(next(self.ids), LOG_CHANGES)
        self.history: dict[tuple[int, int], dict[bytes, bytes]] = getattr(self, "history", {})
        self.history[self.log.epoch, 0] = {}
        super().begin()

    def changed(self) -> None:
        events = self.ledger.drain_events()
        self.kept.note(events)
        self.log.append(events)
        self.history[self.log.epoch, self.log.last] = parents_of(self.ledger)


class Outsider:
    """A follower whose connection may break between any two messages."""

    def __init__(self) -> None:
        self.mirror = BlockMirror()
        self.stream: FollowerStream | None = None
        self.log: BlockLog | None = None

    def connect(self, node: LoggedNode) -> None:
        self.mirror.begin()
        self.log = node.log
        place = self.mirror.log_epoch, self.mirror.number
        self.stream = FollowerStream(node.ledger.tree, node.log, lambda: FACTS, *place)

    def read(self, node: LoggedNode) -> bool:
        """Read a message; return whether there was one. The node has no streams of its other lives."""
        if self.stream is None or self.log is not node.log:
            self.connect(node)
        assert self.stream is not None
        try:
            message = self.stream.next_message()
        except Overloaded:
            self.stream = None
            return True
        if message is not None:
            self.mirror.apply(BlockChanges.FromString(message.SerializeToString()))
        return message is not None

    def check(self, node: LoggedNode) -> None:
        mirror = self.mirror
        mirror.check_integrity()
        known = node.history.get((mirror.log_epoch, mirror.number))
        # Within the changes of one moment, the node does not say what its pool is.
        assert known is None or mirror.blocks == known
        assert mirror.log_epoch or not mirror.blocks


class FollowedLives(MortalLives):
    """Two tokens and ten slots: blocks are shared, evicted, kept over deaths and recomputed all the time."""

    @initialize()
    def first_life(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(block_log, "MAX_MESSAGE_BLOCKS", MESSAGE_BLOCKS)
        self.node = LoggedNode()
        self.followers = [Outsider(), Outsider()]

    @rule(seed=st.integers(0, 2**16))
    def do_something(self, seed: int) -> None:
        self.node.act(random_act(self.node, Random(seed)))

    @rule(who=st.integers(0, 1), messages=st.integers(1, 4))
    def read(self, who: int, messages: int) -> None:
        for _ in range(messages):
            self.followers[who].read(self.node)
            self.followers[who].check(self.node)

    @rule(who=st.integers(0, 1))
    def lose_the_connection(self, who: int) -> None:
        self.followers[who].stream = None

    @invariant()
    def mirrors_are_what_they_say(self) -> None:
        if hasattr(self, "node"):
            self.node.log.check_integrity(self.node.ledger.tree)
            for follower in self.followers:
                follower.check(self.node)

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.act(self.node.settle)
            for follower in self.followers:
                while follower.read(self.node):
                    pass
                assert follower.mirror.blocks == parents_of(self.node.ledger)
                assert follower.mirror.number == self.node.log.last
            self.patch.undo()


FollowedLives.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestFollowedLives = FollowedLives.TestCase


def stored(block_hash: bytes, parent: bytes = b"") -> IndexEvent:
    return IndexEvent(block_hash, here=True, parent=parent)


def test_a_log_drops_its_oldest_events() -> None:
    log = BlockLog(9, 3)
    assert (log.first, log.last) == (1, 0)
    assert log.after(0, 5) == []
    log.append([stored(A), stored(B, A)])
    assert [change.event.block_hash for change in log.after(1, 5)] == [B]
    log.append([IndexEvent(B, here=False), stored(C, A), stored(D, C)])
    assert (log.first, log.last, log.blocks) == (3, 5, 3)
    assert [(change.event.block_hash, change.blocks) for change in log.after(2, 2)] == [(B, 1), (C, 2)]
    assert not log.keeps(9, 1)
    assert not log.keeps(8, 4), "another life's number means nothing"
    assert not log.keeps(9, 6), "nor does one that is yet to come"
    with pytest.raises(Overloaded, match="changes 3 to 5"):
        log.after(1, 5)


def test_a_snapshot_ends_with_the_changes_that_would_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "MAX_MESSAGE_BLOCKS", 1)
    tree, log = BlockTree(LruEviction()), BlockLog(1, 2)
    last_block = None
    for slot, block_hash in enumerate((A, B, C)):
        last_block = tree.add(slot, block_hash, last_block)
    log.append([stored(A), stored(B, A), stored(C, B)])
    stream = FollowerStream(tree, log, lambda: FACTS, 0, 0)
    for events in ([stored(D, C), IndexEvent(D, here=False)], [stored(D, C)]):
        part = stream.next_message()
        assert part is not None
        assert part.kind == BlockChanges.KIND_SNAPSHOT_PART
        log.append(events)
    with pytest.raises(Overloaded, match="is at change 3, and the log only has changes 5 to 6"):
        stream.next_message()


def test_a_missing_event_is_detected() -> None:
    ledger_tree, log = BlockTree(LruEviction()), BlockLog(1, 9)
    ledger_tree.add(0, A, None)
    with pytest.raises(Internal, match="0 blocks, the pool has 1"):
        log.check_integrity(ledger_tree)
    log.append([stored(A)])
    log.check_integrity(ledger_tree)


def test_consecutive_changes_are_joined_into_runs() -> None:
    runs = to_runs([(True, b"", A), (True, A, B), (True, A, C), (False, b"", C), (False, b"", B), (True, A, D)])
    assert [(run.removed, run.parent, split_hashes(run.block_hashes)) for run in runs] == [
        (False, b"", [A, B]),
        (False, A, [C]),
        (True, b"", [C, B]),
        (False, A, [D]),
    ]


def test_followers_get_the_pool_shape_once_it_is_known() -> None:
    facts: list[PoolFacts] = []
    stream = FollowerStream(BlockTree(LruEviction()), BlockLog(1, 9), lambda: facts[0] if facts else None, 0, 0)
    first = stream.next_message()
    assert first is not None
    assert (first.kind, first.HasField("pool")) == (BlockChanges.KIND_SNAPSHOT_END, False)
    assert stream.next_message() is None
    facts.append(FACTS)
    second = stream.next_message()
    assert second is not None
    assert second.pool == FACTS
    assert stream.next_message() is None


def mirror_of(*events: IndexEvent) -> tuple[BlockMirror, BlockLog]:
    """Return a mirror that has caught up with a log."""
    log, mirror = BlockLog(5, 99), BlockMirror()
    stream = FollowerStream(BlockTree(LruEviction()), log, lambda: FACTS, 0, 0)
    log.append(events)
    while (message := stream.next_message()) is not None:
        mirror.apply(message)
    return mirror, log


def changes(log: BlockLog, number: int, *events: IndexEvent) -> BlockChanges:
    log.append(events)
    message = FollowerStream(BlockTree(LruEviction()), log, lambda: FACTS, log.epoch, number).next_message()
    assert message is not None
    return message


def skip(message: BlockChanges) -> None:
    message.number += 1


def other_life(message: BlockChanges) -> None:
    message.log_epoch += 1


def other_count(message: BlockChanges) -> None:
    message.blocks += 1


def other_digest(message: BlockChanges) -> None:
    message.digest ^= 1


def twice(message: BlockChanges) -> None:
    message.runs[0].block_hashes, message.runs[0].parent = B, A


def orphan(message: BlockChanges) -> None:
    message.runs[0].parent = D


def never_came(message: BlockChanges) -> None:
    message.runs[0].removed = True


@pytest.mark.parametrize("damage", [skip, other_life, other_count, other_digest, twice, orphan, never_came])
def test_a_mirror_rejects_inconsistent_changes(damage: Callable[[BlockChanges], None]) -> None:
    mirror, log = mirror_of(stored(A), stored(B, A))
    message = changes(log, 2, stored(C, B))
    damage(message)
    with pytest.raises(Internal):
        mirror.apply(message)
    mirror.forget()
    assert (mirror.blocks, mirror.log_epoch, mirror.number, mirror.pool) == ({}, 0, 0, None)


def test_a_snapshot_takes_effect_only_at_its_end() -> None:
    mirror, log = mirror_of(stored(A), stored(B, A))
    part = BlockChanges(kind=BlockChanges.KIND_SNAPSHOT_PART, log_epoch=6, number=1, runs=to_runs([(True, b"", D)]))
    assert mirror.apply(part) == [BlockChange(D, stored=True)]
    assert mirror.blocks == {A: b"", B: A}
    with pytest.raises(Internal, match="not completed"):
        mirror.apply(changes(log, 2, stored(C, B)))
    mirror.begin()
    mirror.apply(changes(log, 2))
    assert mirror.blocks == {A: b"", B: A, C: B}
    with pytest.raises(Internal, match="node has 0 blocks, the mirror 1"):
        mirror.apply(BlockChanges(kind=BlockChanges.KIND_SNAPSHOT_END, runs=part.runs))


def test_hashes_of_another_length_are_rejected() -> None:
    message = BlockChanges()
    message.runs.add(block_hashes=b"short")
    with pytest.raises(InvalidRequest, match="5 bytes"):
        BlockMirror().apply(message)
