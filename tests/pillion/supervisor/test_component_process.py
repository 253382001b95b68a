"""One component in its own process, from its start to its end."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from lab.testbed.conditions import WITHIN_S
from pillion.supervisor.component_process import MAX_OPEN_FILES

ROOT = pathlib.Path(__file__).resolve().parents[3]
# A KV node that is told to stop as soon as it serves; the program prints how many objects collections pass over, and
# how many files it may have open.
PROGRAM = """
import gc, os, resource, signal, sys
from pillion.config import KVNodeFlags
from pillion.kvstore import assemble
from pillion.supervisor import component_process

real = assemble.start_kvnode
async def start_kvnode(flags):
    node = await real(flags)
    os.kill(os.getpid(), signal.SIGTERM)
    return node

assemble.start_kvnode = start_kvnode
listen, attach = (f"{sys.argv[1]}/{name}.sock" for name in "ka")
flags = KVNodeFlags(redis_url="", kv_pool_bytes=2**20, node_listen=f"unix:{listen}", attach_socket=attach)
status = component_process.run_component("kvnode", flags)
print(status, gc.get_freeze_count(), int(gc.isenabled()), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def component(folder: pathlib.Path, *, soft_files: int) -> tuple[int, int, int, int, int]:
    """Run the component with a soft limit of open files; return its status, the number of frozen objects, whether
    garbage collection is enabled, and both limits of open files."""
    argv = ["sh", "-c", f'ulimit -Sn {soft_files}; exec "$@"', "sh", sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=2 * WITHIN_S)
    assert done.returncode == 0, done.stderr
    status, frozen, collects, soft, hard = map(int, done.stdout.split()[-5:])
    return status, frozen, collects, soft, hard


def test_loaded_objects_are_frozen_for_gc_and_the_open_file_limit_is_raised(
    tmp_path: pathlib.Path,
) -> None:
    status, frozen, collects, soft, hard = component(tmp_path, soft_files=256)
    assert status == 0
    assert collects
    assert frozen > 10_000
    assert soft == (min(hard, MAX_OPEN_FILES) if hard > 0 else MAX_OPEN_FILES)


def test_a_component_exits_without_python_cleanup() -> None:
    program = (
        "import atexit; from pillion.supervisor.component_process import end_process; "
        "atexit.register(print, 'freed'); print('its last line'); end_process(3)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stdout) == (3, "its last line\n")
