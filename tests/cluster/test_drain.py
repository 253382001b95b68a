"""`pillion serve` gets a signal to end while it streams: the streams finish first, with all their tokens."""

from __future__ import annotations

import pathlib
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pillion import Client, Delta, PillionError
from testbed.cluster import STOP_TIMEOUT_S, served
from testbed.conditions import WITHIN_S, wait_for
from testbed.tiny_model import save_model

pytestmark = pytest.mark.cluster

STREAMS, TOKENS = 4, 3000


def read(target: str, begun: threading.Semaphore) -> list[Delta]:
    deltas = []
    with Client(target, resume_timeout_s=0) as client:
        for delta in client.generate("x", max_tokens=TOKENS, ignore_eos=True):
            if not deltas:
                begun.release()
            deltas.append(delta)
    return deltas


@pytest.mark.parametrize("drain_s", [300.0, 0.0])
def test_sigterm_lets_streams_finish_within_the_timeout(tmp_path: pathlib.Path, drain_s: float) -> None:
    model = str(save_model(tmp_path / "tiny"))
    flags = ("--max-model-len", "4096", "--kv-pool-bytes", "64MiB", "--dtype", "float32", "--drain-timeout-s")
    with (
        tempfile.TemporaryDirectory(prefix="pld-") as folder,
        served(pathlib.Path(folder), model, *flags, str(drain_s)) as cluster,
    ):
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(STREAMS) as pool:
            reading = [pool.submit(read, cluster.target, begun) for _ in range(STREAMS)]
            for _ in range(STREAMS):
                assert begun.acquire(timeout=200)
            cluster.process.send_signal(signal.SIGTERM)
            if drain_s:
                for work in reading:
                    deltas = work.result(300)
                    assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
                    assert deltas[-1].usage is not None
            else:
                for work in reading:
                    with pytest.raises(PillionError):
                        work.result(WITHIN_S)
        assert cluster.process.wait(STOP_TIMEOUT_S) == 0
        wait_for("everything to be gone", lambda: not cluster.left_behind())
