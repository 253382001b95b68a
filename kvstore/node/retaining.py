"""A node's retentions with real time: who asks for them, when they end, and what the node's next life knows of them.

    start --record read--> retained again, as far as their time is not over; the chains come with the pool, or later
      while it runs: what is over ends; the record is written when something has changed, and again for an emptied Redis

The ledger decides (:mod:`pillion.kvstore.ledger.retentions`). Without Redis, and while it does not answer, everything
goes on but that a restarted node knows nothing of them: they lapse.

The record is read once the pool has its shape and Redis answers, which may be long after the first call. A retention
that is dropped before that is remembered by its name, and is not taken back from the record: a call that waited for
Redis, or failed without it, would make pins depend on Redis while the node lives. One in whose place another was
retained does not come back, either, as long as that one lasts. A list that is asked for before the record was read
lacks what only the record knows.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pillion.errors import InvalidRequest, PillionError, Unavailable
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.index.retention_records import RetentionRecord, RetentionRecords
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import Retention, RetentionWish
from pillion.v1.kvnode_pb2 import DropRetentionRequest, ListRetentionsReply, ListRetentionsRequest, RetainChainRequest
from pillion.v1.kvnode_pb2 import Retention as RetentionReply

log = logging.getLogger("pillion.kvnode")

# Between two looks for what is over, and for a change that is yet to be written.
LOOK_S = 1.0
# The record is written again after this time, also where nothing has changed: Redis may have been emptied.
REPEAT_S = 10.0
# Characters of the names that a record has: a tenant's and a pin's, which the gateway bounds more tightly.
MAX_NAME_CHARS = 256
# Dropped names that are remembered until the record was read.
MAX_UNREAD_DROPS = 4096


class Retaining:
    """The retentions of one pool. Called on the node's loop alone.

    Args:
        records: where they are written for the node's next life; None: nowhere.
    """

    def __init__(self, ledger: Ledger, records: RetentionRecords | None = None) -> None:
        self._ledger = ledger
        self._records = records
        self._read = self._changed = False
        # Owners and names that were dropped before the record was read.
        self._dropped: set[tuple[str, str]] = set()
        self._written_s = float("-inf")

    def retain(self, request: RetainChainRequest) -> RetentionReply:
        """Retains a chain. Raises InvalidRequest, Overloaded beyond a quota, Unavailable before the pool has its shape,
        and Conflict for a fenced epoch."""
        now = self._active(request.epoch)
        if not self._ledger.num_slots:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        hashes = split_hashes(request.block_hashes)
        if not hashes or max(map(len, (request.owner, request.name, request.model))) > MAX_NAME_CHARS:
            raise InvalidRequest(f"a pin needs a block, and names of at most {MAX_NAME_CHARS} characters")
        wish = RetentionWish(
            owner=request.owner,
            name=request.name,
            tail_hash=hashes[-1],
            blocks=len(hashes),
            until_s=now + request.ttl_s,
            tokens=request.tokens,
            model=request.model,
            ephemeral=request.ephemeral,
        )
        retention = self._ledger.retentions.retain(wish, now, hashes, request.most_blocks)
        self._changed = True
        return _described(retention, now)

    def drop(self, request: DropRetentionRequest) -> bool:
        """Ends a retention; returns whether there was one, or may be one in the record that was not read yet. Raises
        Unavailable where no more drops can be remembered until it is, and Conflict for a fenced epoch."""
        self._active(request.epoch)
        remembered = self._remember_drop(request.owner, request.name)
        dropped = self._ledger.retentions.drop(request.owner, request.name)
        self._changed |= dropped
        return dropped or remembered

    def listed(self, request: ListRetentionsRequest) -> ListRetentionsReply:
        """Returns an owner's retentions, without those that only a record knows that was not read yet."""
        now = self._seen(request.epoch)
        found = self._ledger.retentions.of(request.owner)
        return ListRetentionsReply(retentions=[_described(retention, now) for retention in found])

    async def run(self) -> None:
        """Ends what is over and keeps the record, until it is cancelled. The pool has its shape."""
        while True:
            self._changed |= self._ledger.retentions.expire(time.monotonic()) > 0
            if self._records is not None:
                try:
                    await self._keep_record(self._records)
                except Unavailable as error:
                    log.debug("the record of pins waits for Redis: %s", error.message)
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        """Writes what has changed last, if Redis answers, and closes the connections. No call changes anything any
        more, and ``run`` has ended. Idempotent."""
        records, self._records = self._records, None
        if records is None:
            return
        try:
            if self._read and self._changed:
                await self._write(records)
        except Unavailable as error:
            log.debug("the record of pins is not the newest one: %s", error.message)
        await records.aclose()

    # -- inside

    async def _keep_record(self, records: RetentionRecords) -> None:
        if not self._read:
            # Before anything is written: the record may have more than this life has yet.
            self._take_back(await records.read())
            self._read = True
            # What is not taken back has to leave the record, too.
            self._changed |= bool(self._dropped)
            self._dropped.clear()
        repeats = self._ledger.retentions.all and time.monotonic() - self._written_s >= REPEAT_S
        if self._changed or repeats:
            await self._write(records)

    def _take_back(self, records: list[RetentionRecord]) -> None:
        now, wall_ms = time.monotonic(), time.time() * 1000
        retentions = self._ledger.retentions
        known_before = len(retentions.all)
        for record in records:
            key = record.owner, record.name
            if key in retentions.all or key in self._dropped or record.until_ms <= wall_ms:
                continue
            wish = RetentionWish(
                owner=record.owner,
                name=record.name,
                tail_hash=record.tail_hash,
                blocks=record.blocks,
                until_s=now + (record.until_ms - wall_ms) / 1000,
                tokens=record.tokens,
                model=record.model,
                ephemeral=record.ephemeral,
            )
            try:
                retentions.retain(wish, now)
            except PillionError as error:
                log.warning("pin %s of the node's earlier life is not taken over: %s", record.name, error.message)
        if taken := len(retentions.all) - known_before:
            log.info("%d pins are known from the node's earlier life", taken)

    async def _write(self, records: RetentionRecords) -> None:
        now, wall_ms = time.monotonic(), time.time() * 1000
        wishes = [retention.wish for retention in self._ledger.retentions.all.values()]
        written = [
            RetentionRecord(
                owner=wish.owner,
                name=wish.name,
                tail_hash=wish.tail_hash,
                blocks=wish.blocks,
                until_ms=round(wall_ms + (wish.until_s - now) * 1000),
                tokens=wish.tokens,
                model=wish.model,
                ephemeral=wish.ephemeral,
            )
            for wish in wishes
        ]
        self._changed = False
        try:
            longest_s = max((wish.until_s - now for wish in wishes), default=0.0)
            await records.write(written, round(longest_s * 1000))
        except BaseException:
            self._changed = True
            raise
        self._written_s = time.monotonic()

    def _remember_drop(self, owner: str, name: str) -> bool:
        """Has a retention not come back with a record that was not read yet; returns whether there is such a record."""
        if self._records is None or self._read or max(len(owner), len(name)) > MAX_NAME_CHARS:
            return False
        if len(self._dropped) >= MAX_UNREAD_DROPS and (owner, name) not in self._dropped:
            raise Unavailable(
                f"this KV node has not read yet which pins its earlier life had, and remembers {MAX_UNREAD_DROPS} that"
                " were dropped since: try again when Redis answers"
            )
        self._dropped.add((owner, name))
        return True

    def _active(self, epoch: int) -> float:
        """Records a sign of life of a caller that may change something. Raises NotFound for a void epoch, Conflict for
        a fenced one."""
        now = self._seen(epoch)
        self._ledger.active(epoch)
        return now

    def _seen(self, epoch: int) -> float:
        """Records a sign of life of the caller. Raises NotFound for a void epoch."""
        now = time.monotonic()
        self._ledger.seen(epoch, now)
        return now


def _described(retention: Retention, now: float) -> RetentionReply:
    wish = retention.wish
    return RetentionReply(
        name=wish.name,
        model=wish.model,
        tokens=wish.tokens,
        blocks=wish.blocks,
        present_blocks=retention.blocks,
        left_s=max(0, round(wish.until_s - now)),
        hits=retention.hits,
        ephemeral=wish.ephemeral,
    )
