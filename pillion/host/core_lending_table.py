"""Makes the lending table by which the workers of one host lend each other cores: a line of shared memory for each
core. Linux only.

    owner, at each kernel of a run:     OWNED_UNTIL = now + LOAN_NS         at the run's end: now + LINGER_NS
    borrower, before each kernel:       not owned, not lent?  LENT_UNTIL = now + LOAN_NS      when it leaves: 0

A worker owns a share of the cores, and its thread pool has a thread for each core of the lending table. Threads on its
own cores take part in every run; a thread on a borrowed core takes part in a kernel only while the core's owner is
idle, and at most one borrower has a core at a time. Both words are times (nanoseconds of CLOCK_MONOTONIC) and not
marks, so a process that dies or is stopped holds nothing for longer than LOAN_NS, and nobody has to clean up after it.
Only speed depends on the lending table: at worst, two threads take turns on one core.

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
# In the line of a core, the words stand at these places. Only the first line of an owner's cores has the time until
# which the owner keeps all its cores.
OWNED_UNTIL, LENT_UNTIL, OWNER, PROCESSOR = (8 * word for word in range(4))
# A loan that is not renewed lasts this long. A kernel that takes longer shares its core for the rest of its time.
LOAN_NS = 200_000_000
# After a run, a worker lends its cores only when this time has passed, which is longer than the host needs between two
# steps of a busy worker.
LINGER_NS = 3_000_000
# A lending table may name processors below this number.
MAX_PROCESSORS = 2**16


class CoreLendingTable:
    """Maps a lending table. :meth:`create` makes one, :meth:`open` maps that of another process; :meth:`close` unmaps
    it.

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
        """Make a lending table in memory with no path of its own, which ends with its last user. Raises OSError where
        the system gives none.

        Args:
            owners: for each core the first core of its owner. A core that nobody owns is its own first core.
            processors: the processor's number of each core, or () where the system places the threads.
        """
        descriptor = os.memfd_create("pillion-cores")
        os.ftruncate(descriptor, len(owners) * LINE_BYTES)
        lending_table = cls(descriptor)
        for core, owner in enumerate(owners):
            lending_table._words[lending_table._place(core, OWNER)] = owner
            lending_table._words[lending_table._place(core, PROCESSOR)] = processors[core] if processors else -1
        return lending_table

    @classmethod
    def open(cls, path: str) -> CoreLendingTable:
        """Map the lending table at ``path``. Raises ConfigError where there is none, or one whose words cannot be
        trusted."""
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(descriptor).st_size
            if not 0 < size <= MAX_CORES * LINE_BYTES or size % LINE_BYTES:
                raise ValueError("it is no core lending table")
            lending_table = cls(descriptor)
            lending_table.check_integrity()
        except (OSError, ValueError, AssertionError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise ConfigError(f"--core-lending-table {path} cannot be used: {error}") from None
        return lending_table

    @property
    def path(self) -> str:
        """Path at which other processes of this user open the table, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def line(self, core: int) -> int:
        """Return the address of a core's line."""
        return self.address + core * LINE_BYTES

    def owner(self, core: int) -> int:
        """Return the first core of the owner of ``core``."""
        return self._words[self._place(core, OWNER)]

    def owned(self, first: int) -> range:
        """Return the cores of the owner whose first core is ``first``; a core that nobody else owns belongs to
        itself."""
        return range(first, first + sum(self.owner(core) == first for core in range(self.cores)))

    def processor(self, core: int) -> int:
        """Return the number of the processor that the core is, or -1."""
        return self._words[self._place(core, PROCESSOR)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every core has an owner, shares are in one piece, and no time is too far off."""
        self._check_owners()
        # The times are read before the clock, because other processes may write later ones meanwhile.
        times, last = self._times(), time.monotonic_ns() + LOAN_NS
        for core, pair in enumerate(times):
            assert 0 <= min(pair) <= max(pair) <= last, f"core {core} is held for longer than a loan lasts"

    def _check_owners(self) -> None:
        """Raise AssertionError for words that native code must not trust, also where Python leaves out its asserts."""
        owners = [self.owner(core) for core in range(self.cores)]
        if owners != sorted(owners):
            raise AssertionError("an owner's cores are not in one piece")
        for core, owner in enumerate(owners):
            if not 0 <= owner <= core:
                raise AssertionError(f"the owner of core {core} begins after it")
            if owners[owner] != owner:
                raise AssertionError(f"the owner of core {core} does not own its first core")
            if not -1 <= self.processor(core) < MAX_PROCESSORS:
                raise AssertionError(f"core {core} is no processor")

    def _times(self) -> list[tuple[int, int]]:
        """Return, for each core, until when its owner keeps it and until when its borrower does."""
        words, place = self._words, self._place
        return [(words[place(core, OWNED_UNTIL)], words[place(core, LENT_UNTIL)]) for core in range(self.cores)]

    @staticmethod
    def _place(core: int, word: int) -> int:
        return (core * LINE_BYTES + word) // 8

    def hold(self) -> object:
        """Return an object that keeps the lending table mapped, even after :meth:`close`, as long as it lives: native
        threads use the memory and do not see this object."""
        return ctypes.c_char.from_buffer(self._memory)

    def close(self) -> None:
        """Unmap the lending table, at once or when its last holder ends. Repeated calls do nothing."""
        if self._descriptor >= 0:
            self._words.release()
            # Memory that something still holds cannot be unmapped; that happens with its last reference.
            with contextlib.suppress(BufferError):
                self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Names a worker's cores in a lending table: those of the owner whose first core is ``first_core``.

    Without ``borrows`` the worker keeps and lends its cores but computes on no others. A worker's ranks borrow none;
    one of them keeps the cores of all while steps run.
    """

    lending_table: CoreLendingTable
    first_core: int
    borrows: bool = True
