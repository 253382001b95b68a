"""Access to slots of GPU pools for tests of KV hosts."""

from __future__ import annotations

import numpy as np

from lab.testbed.fake_cuda import DeviceBytes
from pillion.kvstore.gpu.cuda_segment import DeviceMapping
from pillion.kvstore.gpu.mapped_memory import PoolShards
from tests.support import kv_hosts
from tests.support.kv_hosts import BLOCK_BYTES, KV_HEADS, KV_ROWS, PIECE_BYTES


class DeviceSlots:
    """The slots of a pool on one GPU, or divided over several."""

    def read(self, pool: DeviceMapping | PoolShards, number: int) -> bytes:
        if isinstance(pool, DeviceMapping):
            return DeviceBytes(pool).read(number * BLOCK_BYTES, BLOCK_BYTES)
        pieces = np.empty((KV_ROWS, KV_HEADS, PIECE_BYTES), np.uint8)
        for index, heads in enumerate(pool.shares):
            size = KV_ROWS * len(heads) * PIECE_BYTES
            found = DeviceBytes(pool.shard(index)).read(number * size, size)
            pieces[:, heads.start : heads.stop] = np.frombuffer(found, np.uint8).reshape(KV_ROWS, len(heads), -1)
        return pieces.tobytes()

    def write(self, pool: DeviceMapping | PoolShards, number: int, data: bytes) -> None:
        if isinstance(pool, DeviceMapping):
            DeviceBytes(pool).write(number * BLOCK_BYTES, data)
            return
        pieces = np.frombuffer(data, np.uint8).reshape(KV_ROWS, KV_HEADS, PIECE_BYTES)
        for index, heads in enumerate(pool.shares):
            mine = np.ascontiguousarray(pieces[:, heads.start : heads.stop]).tobytes()
            DeviceBytes(pool.shard(index)).write(number * len(mine), mine)


kv_hosts.DEVICE_SLOTS.append(DeviceSlots())
