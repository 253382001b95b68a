"""The hand-over of a leaving node: its order, rate, time and room, whatever other nodes answer."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.ledger import SESSION, Ledger, PoolShares
from pillion.kvstore.ledger.pin_table import PrefixPinRequest
from pillion.kvstore.transfer.hand_over import (
    MAX_FAILED_ASKS,
    PIECE_BYTES,
    HandOver,
    HandOverAsk,
    HandOverLook,
    OtherNode,
    rooms_of,
    warm_tips,
)
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.examples import examples

BLOCK_BYTES = PIECE_BYTES // 4
CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12, unique_by=tuple)


class OtherPool:
    """A node that is asked, with ``room`` slots. It takes as many blocks as ``moods`` say, or fails."""

    def __init__(self, room: int, moods: random.Random | None = None) -> None:
        self.blocks: set[tuple[int, ...]] = set()
        self.room, self.moods = room, moods

    def ask(self, chain: tuple[tuple[int, ...], ...], max_blocks: int) -> tuple[int, int] | None:
        if self.moods is not None and self.moods.random() < 0.3:
            return None
        here = self.prefix(chain)
        wanted = min(max_blocks, len(chain) - here)
        fetched = wanted if self.moods is None else self.moods.randint(0, wanted)
        self.blocks.update(chain[here : here + fetched])
        return here + fetched, fetched

    def prefix(self, chain: tuple[tuple[int, ...], ...]) -> int:
        return next((at for at, name in enumerate(chain) if name not in self.blocks), len(chain))


def unknown(plan: HandOver[tuple[int, ...]], now_s: float) -> HandOverAsk[tuple[int, ...]] | float | None:
    """Return the next step of a hand-over with an empty index."""
    while isinstance(step := plan.next(now_s), HandOverLook):
        assert plan.record_lookup(step, {}) is None
    return step


def named(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens[: depth + 1]) for depth in range(len(tokens)))


@given(CHAINS, st.lists(st.integers(1, 30), max_size=3), st.integers(0, 2**16), st.booleans(), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_hand_over_respects_its_limits(
    chains: list[list[int]], rooms: list[int], seed: int, troubled: bool, data: st.DataObject
) -> None:
    bytes_per_s, until_s = data.draw(st.sampled_from([BLOCK_BYTES, 100 * BLOCK_BYTES])), data.draw(st.floats(0.1, 40.0))
    others = {
        f"n{at}": OtherPool(room, random.Random(seed + at) if troubled else None) for at, room in enumerate(rooms)
    }
    plan: HandOver[tuple[int, ...]] = HandOver(
        map(named, chains),
        {name: other.room for name, other in others.items()},
        block_bytes=BLOCK_BYTES,
        bytes_per_s=bytes_per_s,
        begun_s=100.0,
        until_s=100.0 + until_s,
    )
    now_s, trusted = 100.0, []
    for _ in range(10_000):
        step = plan.next(now_s)
        if step is None:
            break
        if isinstance(step, float):
            assert now_s < step <= 100.0 + until_s
            now_s = step
            continue
        if isinstance(step, HandOverLook):
            said = {
                name: other.prefix(step.chain) if other.moods is None else other.moods.randint(0, len(step.chain))
                for name, other in others.items()
            }
            held_by = plan.record_lookup(step, said)
            assert held_by is None or said[held_by] == len(step.chain)
            trusted += [(held_by, step.chain)] if held_by is not None else []
            continue
        assert now_s < 100.0 + until_s
        assert step.max_blocks * BLOCK_BYTES <= PIECE_BYTES
        # What went is ahead of the rate by one piece at most.
        assert plan.blocks * BLOCK_BYTES <= (now_s - 100.0) * bytes_per_s + 1e-3
        answer = others[step.node_id].ask(step.chain, step.max_blocks)
        if answer is None:
            plan.record_failure(step)
        else:
            assert plan.record_answer(step, *answer) == (answer[0] == len(step.chain))
    else:
        raise AssertionError("the hand-over does not end")
    for other in others.values():
        assert len(other.blocks) <= other.room
    for node_id, chain in plan.whole:
        assert set(chain) <= others[node_id].blocks or (node_id, chain) in trusted
    assert not trusted or all(len(others[node_id].blocks) == others[node_id].room for node_id, _ in trusted)
    # Each chain is whole somewhere, or left for another place, once.
    told = [chain for _, chain in plan.whole] + list(plan.leftover())
    assert sorted(told) == sorted(map(named, chains))


@given(CHAINS)
@settings(max_examples=examples(100), deadline=None)
def test_all_chains_are_handed_over_given_time_and_room(chains: list[list[int]]) -> None:
    other = OtherPool(1000)
    plan: HandOver[tuple[int, ...]] = HandOver(
        map(named, chains), {"n": 1000}, block_bytes=BLOCK_BYTES, bytes_per_s=1e12, begun_s=0.0, until_s=1e9
    )
    now_s = 0.0
    while (step := unknown(plan, now_s)) is not None:
        if isinstance(step, float):
            now_s = step
        else:
            answer = other.ask(step.chain, step.max_blocks)
            assert answer is not None
            plan.record_answer(step, *answer)
    assert [chain for _, chain in plan.whole] == list(map(named, chains))
    assert other.blocks == {name for chain in chains for name in named(chain)}
    assert plan.blocks == len(other.blocks)


def test_a_node_that_accepts_nothing_is_not_asked_again() -> None:
    plan: HandOver[tuple[int, ...]] = HandOver(
        map(named, [[1], [2], [3]]), {"bad": 50, "good": 40}, block_bytes=1, bytes_per_s=1e9, begun_s=0.0, until_s=1e9
    )
    asked = []
    while (step := unknown(plan, 1e8)) is not None:
        assert not isinstance(step, float)
        asked.append(step.node_id)
        if step.node_id == "bad":
            plan.record_failure(step)
        else:
            plan.record_answer(step, len(step.chain), len(step.chain))
    assert asked == ["bad"] * MAX_FAILED_ASKS + ["good"] * 2
    assert plan.left == [named([1])]


def test_a_chain_is_handed_to_the_node_with_its_prefix() -> None:
    plan: HandOver[tuple[int, ...]] = HandOver(
        map(named, [[1], [2], [1, 1]]), {"a": 50, "b": 50}, block_bytes=1, bytes_per_s=1e9, begun_s=0.0, until_s=1e9
    )
    while (step := unknown(plan, 1e8)) is not None:
        assert not isinstance(step, float)
        plan.record_answer(step, len(step.chain), 1)
    where = {chain: node_id for node_id, chain in plan.whole}
    assert where[named([1, 1])] == where[named([1])] != where[named([2])]


def test_a_chain_that_a_node_has_is_not_sent_to_another_one() -> None:
    pools = {"roomy": OtherPool(50), "holder": OtherPool(40)}
    pools["holder"].blocks = {*named([1, 1, 1]), *named([2])}
    chains = [named([1, 1, 1]), named([2, 2, 2]), named([3])]
    plan: HandOver[tuple[int, ...]] = HandOver(
        chains, {"roomy": 50, "holder": 40}, block_bytes=1, bytes_per_s=1e9, begun_s=0.0, until_s=1e9
    )
    sent = {}
    while (step := plan.next(1e8)) is not None:
        assert not isinstance(step, float)
        if isinstance(step, HandOverLook):
            # The leaving node is also in the index.
            held = {"leaving": len(step.chain), **{name: pool.prefix(step.chain) for name, pool in pools.items()}}
            assert plan.record_lookup(step, held) is None
        else:
            answer = pools[step.node_id].ask(step.chain, step.max_blocks)
            assert answer is not None
            sent[step.chain] = step.node_id, answer[1]
            plan.record_answer(step, *answer)
    assert sent == {chains[0]: ("holder", 0), chains[1]: ("holder", 2), chains[2]: ("roomy", 1)}
    assert plan.blocks == 3
    assert [chain for _, chain in plan.whole] == chains


def test_a_chain_on_a_full_node_is_not_sent_to_others() -> None:
    chains = [named([1]), named([2])]
    plan: HandOver[tuple[int, ...]] = HandOver(
        chains, {"full": 1, "roomy": 1}, block_bytes=1, bytes_per_s=1e9, begun_s=0.0, until_s=1e9
    )
    look = plan.next(1e8)
    assert isinstance(look, HandOverLook)
    assert plan.record_lookup(look, {"full": 0}) is None
    ask = plan.next(1e8)
    assert isinstance(ask, HandOverAsk)
    assert ask.node_id == "full"
    plan.record_answer(ask, 1, 1)
    look = plan.next(1e8)
    assert isinstance(look, HandOverLook)
    assert plan.record_lookup(look, {"full": 1, "roomy": 0}) == "full"
    assert plan.next(1e8) is None
    assert plan.whole == [("full", chains[0]), ("full", chains[1])]


def test_a_wrong_index_costs_one_extra_request() -> None:
    plan: HandOver[tuple[int, ...]] = HandOver(
        map(named, [[1, 1]]), {"said": 9, "roomy": 10}, block_bytes=1, bytes_per_s=1e9, begun_s=0.0, until_s=1e9
    )
    look = plan.next(1e8)
    assert isinstance(look, HandOverLook)
    plan.record_lookup(look, {"said": 2})
    asked = []
    while (step := plan.next(1e8)) is not None:
        assert isinstance(step, HandOverAsk)
        asked.append(step.node_id)
        plan.record_answer(step, *((0, 0) if step.node_id == "said" else (2, 2)))
    assert asked == ["said", "roomy"]


def test_room_is_free_slots_plus_a_fair_share_of_cached_ones() -> None:
    others = [OtherNode("empty", 100, 0), OtherNode("full", 0, 100), OtherNode("pinned", 0, 0)]
    # 100 of 200 blocks have to go somewhere, so half of the full node's make room.
    assert rooms_of(100, others) == {"empty": 100, "full": 50}
    assert rooms_of(0, others) == {"empty": 100}


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=15),
    st.integers(0, 14),
)
@settings(max_examples=examples(150), deadline=None)
def test_chain_tips_are_in_reverse_eviction_order(prompts: list[list[int]], pinned: int) -> None:
    ledger = Ledger(itertools.count(1).__next__, 0, PoolShares(90, 90))
    ledger.shape(200)
    epoch = ledger.attach("one", SESSION)
    for nonce, tokens in enumerate(prompts, 1):
        hashes = split_hashes(chain_hashes(bytes(32), tokens, 1))
        ticket = ledger.admit(epoch, nonce, hashes, len(hashes))
        assert ticket is not None
        left = hashes[ticket.blocks :]
        slots = ledger.adopt(epoch, ticket.ticket_id, len(left)).leased_slots
        if left:
            ledger.commit(epoch, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))])
        ledger.release(epoch, [ticket.ticket_id])
        if nonce - 1 == pinned:
            wish = PrefixPinRequest("me", "it", hashes[-1], len(hashes), until_s=100.0)
            ledger.prefix_pins.pin_prefix(wish, 0.0, hashes)
    hot_first = list(reversed(list(ledger.tree.policy)))
    tips = warm_tips(hot_first, lambda block: block.parent, lambda block: block.prefix_pins > 0)
    covered = list(dict.fromkeys(block for tip in tips for block in ledger.tree.chain(tip)))
    # Every block goes, and those that would have been evicted last go first.
    assert covered == hot_first
    kept = [tip.prefix_pins > 0 for tip in tips]
    assert kept == sorted(kept, reverse=True)
