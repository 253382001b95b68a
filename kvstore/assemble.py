"""Assembly of a KV node: its parts, and the flags that enable them.

    always          the pool's ledger, prefix pins, followers, adapters, regions, other nodes
    --kv-device     memory domain: this host or GPUs
    --keeper-socket memory that outlives the node
    --disk-path     disk tier          --object-url  bucket tier

The pool exists from the start; the first worker sets its shape, and then the node creates its memory and tiers
(:class:`pillion.kvstore.tiers.storage.Storage`).
"""

from __future__ import annotations

import secrets

from pillion.config import KVNodeFlags, check_conflicts
from pillion.errors import ConfigError
from pillion.kvstore.adapters.node_adapter_servicer import adapter_calls
from pillion.kvstore.adapters.node_adapters import NodeAdapters
from pillion.kvstore.events.block_log import BlockLog
from pillion.kvstore.events.followers import Followers
from pillion.kvstore.exchange.node_exchange import NodeExchange
from pillion.kvstore.gpu.region_server import RegionServer
from pillion.kvstore.ledger.ledger import Ledger, PoolShares
from pillion.kvstore.memory.domain import CPU, Domain, HostDomain
from pillion.kvstore.memory.node_memory import NodeMemory
from pillion.kvstore.node.kv_node import KVNode
from pillion.kvstore.node.node_directory import NodeDirectory
from pillion.kvstore.node.pool import new_id
from pillion.kvstore.pool_survival.surviving_memory import SurvivingMemory
from pillion.kvstore.prefix_pins.node_pins import NodePrefixPins
from pillion.kvstore.prefix_pins.pin_records import PrefixPinRecords
from pillion.kvstore.prefix_pins.pin_servicer import pin_calls
from pillion.kvstore.tiers.disk_tier.disk_files import DiskFolder
from pillion.kvstore.tiers.object_tier.object_store import ObjectStore, parse_object_url
from pillion.settings.node_limits import NodeLimits


async def start_kvnode(flags: KVNodeFlags, limits: NodeLimits | None = None) -> KVNode:
    """Start a node, which serves when this returns. Raises ConfigError, with everything freed, if it cannot start."""
    node = make_kvnode(flags, limits)
    try:
        await node.start()
    except BaseException:
        await node.stop(0.0)
        raise
    return node


def make_kvnode(flags: KVNodeFlags, limits: NodeLimits | None = None) -> KVNode:
    """Create a node on the running loop. Raises ConfigError for contradicting flags and for an unusable disk or
    bucket."""
    check_conflicts(flags)
    limits = limits or NodeLimits()
    if not flags.node_id:
        raise ConfigError("--node-id must name the node")
    directory = NodeDirectory(flags)
    surviving = SurvivingMemory(flags, open_domain) if flags.keeper_socket else None
    memory = NodeMemory(flags, open_domain) if surviving is None else surviving
    # A tenant may use half of the share for prefix pins.
    shares = PoolShares(limits.pinned_percent, limits.pinned_percent // 2, limits.state_percent)
    ledger = Ledger(new_id, limits.decode_reserve_percent, shares)
    records = PrefixPinRecords(flags.redis_url, flags.node_id) if flags.redis_url else None
    pins = NodePrefixPins(ledger, records)
    changes = BlockLog(secrets.randbits(62) + 1)
    return KVNode(
        flags,
        limits,
        directory,
        memory,
        NodeExchange(flags, directory.addresses, lambda: directory.boot_epoch, pins.ending_in),
        ledger=ledger,
        prefix_pins=pins,
        survival=None if surviving is None else surviving.survival,
        followers=Followers(ledger.tree, changes, flags.node_id, flags.kv_device),
        calls={**pin_calls(pins), **adapter_calls(NodeAdapters(flags, directory.addresses))},
        regions=RegionServer(flags.node_id, memory),
        disk=DiskFolder(flags.disk_path) if flags.disk_path else None,
        bucket=ObjectStore(parse_object_url(flags.object_url)) if flags.object_url else None,
    )


def open_domain(flags: KVNodeFlags) -> Domain:
    """Open the memory domain of ``--kv-device``. Raises ConfigError if it does not exist or other flags contradict
    it."""
    if flags.kv_device == CPU:
        return HostDomain(flags)
    from pillion.kvstore.gpu.cuda_domain import open_cuda_domain

    return open_cuda_domain(flags)
