"""`pillion serve --drain-timeout-s 0` gets a signal to end while it streams: the streams end with an error, at once.

tests/cluster/test_gateway_workers.py shows that streams finish first where they have the time.
"""

from __future__ import annotations

import pathlib
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pillion import Client, PillionError
from testbed.cluster import STOP_TIMEOUT_S, served
from testbed.conditions import WITHIN_S, wait_for
from testbed.tiny_model import save_model

pytestmark = pytest.mark.cluster

STREAMS, TOKENS = 4, 3000


def read(target: str, begun: threading.Semaphore) -> None:
    with Client(target, resume_timeout_s=0) as client:
        stream = client.generate("x", max_tokens=TOKENS, ignore_eos=True)
        next(stream)
        begun.release()
        for _ in stream:
            pass


def test_without_a_timeout_sigterm_ends_streams(tmp_path: pathlib.Path) -> None:
    model = str(save_model(tmp_path / "tiny"))
    flags = ("--max-model-len", "4096", "--kv-pool-bytes", "64MiB", "--dtype", "float32", "--drain-timeout-s", "0")
    with (
        tempfile.TemporaryDirectory(prefix="pld-") as folder,
        served(pathlib.Path(folder), model, *flags) as cluster,
    ):
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(STREAMS) as pool:
            reading = [pool.submit(read, cluster.target, begun) for _ in range(STREAMS)]
            for _ in range(STREAMS):
                assert begun.acquire(timeout=200)
            cluster.process.send_signal(signal.SIGTERM)
            for work in reading:
                with pytest.raises(PillionError):
                    work.result(WITHIN_S)
        assert cluster.process.wait(STOP_TIMEOUT_S) == 0
        wait_for("everything to be gone", lambda: not cluster.left_behind())
