"""Host memory that a GPU copies from and to without a detour."""

from __future__ import annotations

import contextlib
import mmap

from pillion.errors import ConfigError
from pillion.kvstore.memory.cuda_driver import Device
from pillion.kvstore.memory.memory import address_of


class PinnedMemory:
    """``size_bytes`` of this process's memory, in whole pages, registered with ``device``.

    Attributes:
        view: its bytes.
        address: of the first one.

    Raises ConfigError where so much cannot be had or pinned.
    """

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        try:
            self._mapped = mmap.mmap(-1, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot have {size_bytes} bytes of host memory: {error}") from None
        self.view = memoryview(self._mapped)
        self.address = address_of(self.view)
        self._registered = False
        try:
            device.register(self.address, size_bytes)
            self._registered = True
        finally:
            if not self._registered:
                self.close()

    def close(self) -> None:
        """No copy is under way any more. Idempotent."""
        if self._registered:
            self._registered = False
            self._device.unregister(self.address)
        with contextlib.suppress(BufferError):
            # Whoever still looks at the memory keeps it mapped.
            self.view.release()
            self._mapped.close()
