"""One component in a process of its own, from its start to its end."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from testbed.conditions import WITHIN_S

ROOT = pathlib.Path(__file__).resolve().parents[3]
# A KV node that is told to stop as soon as it serves; the program prints how many objects collections pass over.
PROGRAM = """
import gc, os, signal, sys
from pillion.config import KVNodeFlags
from pillion.kvstore.node import kv_node
from pillion.supervisor import component_process

real = kv_node.start_kvnode
async def start_kvnode(flags):
    node = await real(flags)
    os.kill(os.getpid(), signal.SIGTERM)
    return node

kv_node.start_kvnode = start_kvnode
listen, attach = (f"{sys.argv[1]}/{name}.sock" for name in "ka")
flags = KVNodeFlags(redis_url="", kv_pool_bytes=2**20, node_listen=f"unix:{listen}", attach_socket=attach)
status = component_process.run_component("kvnode", flags)
print(status, gc.get_freeze_count())
"""


def test_no_collection_looks_through_what_a_component_has_loaded(tmp_path: pathlib.Path) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=2 * WITHIN_S)
    status, frozen = map(int, done.stdout.split()[-2:])
    assert status == 0, done.stderr
    assert frozen > 10_000
