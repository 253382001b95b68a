"""Table by which the workers of one host lend each other cores: a line of shared memory per core. Linux only.

    owner, at each kernel of a run:     OWNED_UNTIL = now + LOAN_NS         at the run's end: now + LINGER_NS
    borrower, before each kernel:       not owned, not lent?  LENT_UNTIL = now + LOAN_NS      when it leaves: 0

A worker owns a share of the cores, and its thread pool has a thread for each core in the table. Threads on its own
cores take part in every run; a thread on a borrowed core takes part in a kernel only while the core's owner is idle,
and a core has at most one borrower. Both words are times (nanoseconds of CLOCK_MONOTONIC) instead of flags, so a
process that dies or is stopped occupies nothing for longer than LOAN_NS, without any cleanup. Only speed depends on the
table: at worst, two threads share one core.

The machine code is in :mod:`pillion.kernels.cpu.runtime.thread_pool_code`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import ConfigError
from pillion.host.cores import MAX_CORES

LINE_BYTES = 64
# Offsets of the words in a core's line. An owner's OWNED_UNTIL for all its cores is in the line of its first core.
OWNED_UNTIL, LENT_UNTIL, OWNER, PROCESSOR = (8 * word for word in range(4))
# Duration of an unrenewed loan. A longer kernel shares its core for the rest of its time.
LOAN_NS = 200_000_000
# Delay after a run before a worker lends its cores: longer than the gap between two steps of a busy worker.
LINGER_NS = 3_000_000


class CoreLendingTable:
    """A mapped lending table. :meth:`create` makes one, :meth:`open` maps another process's; :meth:`close` unmaps it.

    ``address`` is where it is mapped; ``cores`` is the number of its lines.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._memory).cast("q")
        self.cores = len(self._memory) // LINE_BYTES
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def create(cls, owners: Sequence[int], processors: Sequence[int] = ()) -> CoreLendingTable:
        """Create a lending table in anonymous memory, which lives until its last user. Raises OSError if the system has
        none.

        Args:
            owners: first core of each core's owner. A core without an owner is its own first core.
            processors: processor number of each core, or () if the system places the threads.
        """
        descriptor = os.memfd_create("pillion-cores")
        os.ftruncate(descriptor, len(owners) * LINE_BYTES)
        lending_table = cls(descriptor)
        for core, owner in enumerate(owners):
            lending_table._words[lending_table._word_index(core, OWNER)] = owner
            lending_table._words[lending_table._word_index(core, PROCESSOR)] = processors[core] if processors else -1
        return lending_table

    @classmethod
    def open(cls, path: str) -> CoreLendingTable:
        """Map the lending table at ``path``. Raises ConfigError if it is missing or untrustworthy."""
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(descriptor).st_size
            if not 0 < size <= MAX_CORES * LINE_BYTES or size % LINE_BYTES:
                raise ValueError("it is not a core lending table")
            lending_table = cls(descriptor)
            lending_table.check_integrity()
        except (OSError, ValueError, AssertionError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise ConfigError(f"--core-lending-table {path} cannot be used: {error}") from None
        return lending_table

    @property
    def path(self) -> str:
        """Path at which other processes of this user can open the table, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def line(self, core: int) -> int:
        """Return the address of a core's line."""
        return self.address + core * LINE_BYTES

    def owner(self, core: int) -> int:
        """Return the first core of a core's owner."""
        return self._words[self._word_index(core, OWNER)]

    def owned(self, first: int) -> range:
        """Return the cores of the owner whose first core is ``first``; an unowned core belongs to itself."""
        return range(first, first + sum(self.owner(core) == first for core in range(self.cores)))

    def processor(self, core: int) -> int:
        """Return the processor number of a core, or -1."""
        return self._words[self._word_index(core, PROCESSOR)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every core has an owner, shares are contiguous, and no time is too far off."""
        self._check_owners()
        # Read before the clock, because other processes may write later times in between.
        times, last = self._times(), time.monotonic_ns() + LOAN_NS
        for core, pair in enumerate(times):
            assert 0 <= min(pair) <= max(pair) <= last, f"core {core} is lent or owned until too late a time"

    def _check_owners(self) -> None:
        """Raise AssertionError for words that native code must not trust, even with Python's asserts disabled."""
        owners = [self.owner(core) for core in range(self.cores)]
        if owners != sorted(owners):
            raise AssertionError("an owner's cores are not in one piece")
        for core, owner in enumerate(owners):
            if not 0 <= owner <= core:
                raise AssertionError(f"the owner of core {core} begins after it")
            if owners[owner] != owner:
                raise AssertionError(f"the owner of core {core} does not own its first core")
            if not -1 <= self.processor(core) < 2**16:
                raise AssertionError(f"core {core} is not a processor")

    def _times(self) -> list[tuple[int, int]]:
        """Return, for each core, until when its owner and its borrower have it."""
        words, index = self._words, self._word_index
        return [(words[index(core, OWNED_UNTIL)], words[index(core, LENT_UNTIL)]) for core in range(self.cores)]

    @staticmethod
    def _word_index(core: int, word: int) -> int:
        return (core * LINE_BYTES + word) // 8

    def hold(self) -> object:
        """Return an object that keeps the table mapped during its lifetime, even after :meth:`close`, for native
        threads that use the memory."""
        return ctypes.c_char.from_buffer(self._memory)

    def close(self) -> None:
        """Unmap the table, now or when its last holder ends. Idempotent."""
        if self._descriptor >= 0:
            self._words.release()
            # Unmapping fails while the memory is in use; it then happens with the last reference.
            with contextlib.suppress(BufferError):
                self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class CoreShare:
    """A worker's cores in a lending table: those of the owner whose first core is ``first_core``.

    Without ``borrows`` the worker reserves and lends its cores but computes on no others. A worker's ranks borrow none;
    one of them reserves the cores of all while steps run.
    """

    lending_table: CoreLendingTable
    first_core: int
    borrows: bool = True
