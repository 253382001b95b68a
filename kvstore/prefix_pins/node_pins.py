"""A node's prefix pins in real time: serves the calls, expires pins, and maintains their record for a restarted node.

    start --record read--> unexpired pins are restored; their chains arrive with the pool, or later
      running: pins expire; the record is written after changes, and periodically in case Redis was emptied

The table decides (:mod:`pillion.kvstore.ledger.pin_table`). Without Redis everything works, except that pins do not
survive a restart of the node.

The record is read once the pool has its shape and Redis answers, which may be long after the first call. Until then,
dropped pins are remembered by name, so that the record does not restore them: waiting for Redis, or failing without it,
would make pins depend on Redis while the node lives. A pin that was replaced is not restored while its replacement
lasts. Before the record is read, lists of pins lack those that only the record has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from pillion.errors import InvalidRequest, PillionError, Unavailable
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.pin_table import PrefixPin, PrefixPinRequest
from pillion.kvstore.prefix_pins.pin_records import PrefixPinRecord, PrefixPinRecords
from pillion.v1.kvnode_pb2 import ListPrefixPinsReply, ListPrefixPinsRequest, PinPrefixRequest, UnpinPrefixRequest
from pillion.v1.kvnode_pb2 import PrefixPin as PrefixPinReply

log = logging.getLogger("pillion.kvnode")

# Interval of checks for expired pins and changes to record.
POLL_S = 1.0
# Interval of writes of an unchanged record, in case Redis was emptied.
REPEAT_S = 10.0
# Max characters of an owner, a pin's name and a model in the record; the gateway's limits are tighter.
MAX_NAME_CHARS = 256
# Drops remembered until the record is read.
MAX_UNREAD_DROPS = 4096


class NodePrefixPins:
    """The prefix pins of one pool. Only the node's loop calls it.

    Args:
        ledger: the pool's ledger.
        records: the record of the pins for a restarted node; None to not record them.
    """

    def __init__(self, ledger: Ledger, records: PrefixPinRecords | None = None) -> None:
        self._ledger = ledger
        self._table = ledger.prefix_pins
        self._records = records
        self._record_read = self._changed = False
        self._unread_drops: set[tuple[str, str]] = set()
        self._written_s = float("-inf")

    def pin_prefix(self, request: PinPrefixRequest) -> PrefixPinReply:
        """Pin a chain for a tenant. Raises InvalidRequest, Overloaded beyond a quota, Unavailable before the pool has
        its shape, and Conflict for a fenced epoch."""
        now = self._touch_active_epoch(request.epoch)
        if not self._ledger.num_slots:
            raise Unavailable("no worker has attached to the KV node yet, so its pool has no shape")
        hashes = split_hashes(request.block_hashes)
        if not hashes or max(map(len, (request.owner, request.name, request.model))) > MAX_NAME_CHARS:
            raise InvalidRequest(f"a pin needs a block, and names of at most {MAX_NAME_CHARS} characters")
        pin_request = PrefixPinRequest(
            owner=request.owner,
            name=request.name,
            last_hash=hashes[-1],
            blocks=len(hashes),
            until_s=now + request.ttl_s,
            tokens=request.tokens,
            model=request.model,
            ephemeral=request.ephemeral,
        )
        pin = self._table.pin_prefix(pin_request, now, hashes, request.most_blocks)
        self._changed = True
        return _reply_of(pin, now)

    def drop(self, request: UnpinPrefixRequest) -> bool:
        """Drop a prefix pin; return whether it existed, or may exist in the unread record. Raises Unavailable if no
        more drops can be remembered until the record is read, and Conflict for a fenced epoch."""
        self._touch_active_epoch(request.epoch)
        remembered = self._remember_drop(request.owner, request.name)
        dropped = self._table.drop(request.owner, request.name)
        self._changed |= dropped
        return dropped or remembered

    def list_pins(self, request: ListPrefixPinsRequest) -> ListPrefixPinsReply:
        """Return an owner's prefix pins, except those only in an unread record."""
        now = self._touch_epoch(request.epoch)
        pins = self._table.of(request.owner)
        return ListPrefixPinsReply(prefix_pins=[_reply_of(pin, now) for pin in pins])

    def ending_in(self, chain: Sequence[bytes]) -> list[PinPrefixRequest]:
        """Return the prefix pins that end with a block of a chain, as requests that recreate them on another node."""
        now = time.monotonic()
        ending = ((pin, depth) for depth, name in enumerate(chain, 1) for pin in self._table.ending_with(name))
        return [
            PinPrefixRequest(
                owner=pin.request.owner,
                name=pin.request.name,
                block_hashes=b"".join(chain[:depth]),
                ttl_s=max(1, round(pin.request.until_s - now)),
                tokens=pin.request.tokens,
                model=pin.request.model,
                ephemeral=pin.request.ephemeral,
            )
            for pin, depth in ending
        ]

    async def run(self) -> None:
        """Expire pins and write the record until cancelled. The pool has its shape."""
        while True:
            self._changed |= self._table.expire(time.monotonic()) > 0
            if self._records is not None:
                try:
                    await self._update_record(self._records)
                except Unavailable as error:
                    log.debug("the record of pins waits for Redis: %s", error.message)
            await asyncio.sleep(POLL_S)

    async def aclose(self) -> None:
        """Write the last changes if Redis answers, and close the connections, after ``run`` and all calls have ended.
        Idempotent."""
        records, self._records = self._records, None
        if records is None:
            return
        try:
            if self._record_read and self._changed:
                await self._write(records)
        except Unavailable as error:
            log.debug("the record of pins is outdated: %s", error.message)
        await records.aclose()

    async def _update_record(self, records: PrefixPinRecords) -> None:
        if not self._record_read:
            # Before any write, because the record may have pins that this process has not restored yet.
            self._restore(await records.read())
            self._record_read = True
            # Remove pins from the record that were dropped before it was read.
            self._changed |= bool(self._unread_drops)
            self._unread_drops.clear()
        repeats = self._table.all and time.monotonic() - self._written_s >= REPEAT_S
        if self._changed or repeats:
            await self._write(records)

    def _restore(self, records: list[PrefixPinRecord]) -> None:
        now, wall_ms = time.monotonic(), time.time() * 1000
        prefix_pins = self._table
        known_before = len(prefix_pins.all)
        for record in records:
            key = record.owner, record.name
            if key in prefix_pins.all or key in self._unread_drops or record.until_ms <= wall_ms:
                continue
            pin_request = PrefixPinRequest(
                owner=record.owner,
                name=record.name,
                last_hash=record.last_hash,
                blocks=record.blocks,
                until_s=now + (record.until_ms - wall_ms) / 1000,
                tokens=record.tokens,
                model=record.model,
                ephemeral=record.ephemeral,
            )
            try:
                prefix_pins.pin_prefix(pin_request, now)
            except PillionError as error:
                log.warning("pin %s of the node's previous process is not recovered: %s", record.name, error.message)
        if restored := len(prefix_pins.all) - known_before:
            log.info("%d pins of the node's previous process are restored", restored)

    async def _write(self, records: PrefixPinRecords) -> None:
        now, wall_ms = time.monotonic(), time.time() * 1000
        requests = [pin.request for pin in self._table.all.values()]
        written = [
            PrefixPinRecord(
                owner=pin_request.owner,
                name=pin_request.name,
                last_hash=pin_request.last_hash,
                blocks=pin_request.blocks,
                until_ms=round(wall_ms + (pin_request.until_s - now) * 1000),
                tokens=pin_request.tokens,
                model=pin_request.model,
                ephemeral=pin_request.ephemeral,
            )
            for pin_request in requests
        ]
        self._changed = False
        try:
            longest_s = max((pin_request.until_s - now for pin_request in requests), default=0.0)
            await records.write(written, round(longest_s * 1000))
        except BaseException:
            self._changed = True
            raise
        self._written_s = time.monotonic()

    def _remember_drop(self, owner: str, name: str) -> bool:
        """Keep a prefix pin from being restored from an unread record; return whether there is such a record."""
        if self._records is None or self._record_read or max(len(owner), len(name)) > MAX_NAME_CHARS:
            return False
        if len(self._unread_drops) >= MAX_UNREAD_DROPS and (owner, name) not in self._unread_drops:
            raise Unavailable(
                "this KV node has not read the pins of its previous process yet, and remembers"
                f" {MAX_UNREAD_DROPS} that were dropped since: try again when Redis answers"
            )
        self._unread_drops.add((owner, name))
        return True

    def _touch_active_epoch(self, epoch: int) -> float:
        """Record a call under an epoch that must not be fenced; return the time. Raises NotFound for a void epoch,
        Conflict for a fenced one."""
        now = self._touch_epoch(epoch)
        self._ledger.active(epoch)
        return now

    def _touch_epoch(self, epoch: int) -> float:
        """Record a call under an epoch; return the time. Raises NotFound for a void epoch."""
        now = time.monotonic()
        self._ledger.touch(epoch, now)
        return now


def _reply_of(pin: PrefixPin, now: float) -> PrefixPinReply:
    pin_request = pin.request
    return PrefixPinReply(
        name=pin_request.name,
        model=pin_request.model,
        tokens=pin_request.tokens,
        blocks=pin_request.blocks,
        present_blocks=pin.blocks,
        left_s=max(0, round(pin_request.until_s - now)),
        hits=pin.hits,
        ephemeral=pin_request.ephemeral,
    )
