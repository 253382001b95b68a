"""A decode worker that is paused for a moment: delayed and later requests are served."""

from __future__ import annotations

import pathlib
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.testbed.cluster import served
from lab.testbed.conditions import wait_for
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from tests.support.cpu_model import needs_kernels

pytestmark = [pytest.mark.cluster, pytest.mark.long, needs_kernels]

FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-pool-bytes", "128MiB")
PAUSE_S = 2.0
SHORT_TOKENS, LONG_TOKENS, AT_ONCE = 8, 4000, 6
# Client timeout of a long prompt, which takes a second or two.
TIMEOUT_S = 30.0


def test_long_prompts_are_served_after_a_pause_of_the_decode_worker(tmp_path: pathlib.Path) -> None:
    model = str(save_model(tmp_path / "tiny"))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *FLAGS, split_policy="colocated", faults=True) as cluster,
        Client(cluster.target) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def answer(prompt: int, length: int, timeout_s: float | None) -> int:
            ids = byte_prompt(prompt, length)
            options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, "cache_salt": str(prompt)}
            return sum(len(delta.token_ids) for delta in client.generate(ids, timeout_s=timeout_s, **options))

        assert answer(0, LONG_TOKENS, None) == 4
        worker = cluster.component("decode")
        assert worker is not None
        worker.send_signal(signal.SIGSTOP)
        try:
            short = [pool.submit(answer, 1 + number, SHORT_TOKENS, None) for number in range(AT_ONCE)]
            wait_for("the short prompts", lambda: client.status().active_requests >= AT_ONCE)
            time.sleep(PAUSE_S)
        finally:
            worker.send_signal(signal.SIGCONT)
        assert [one.result() for one in short] == [4] * AT_ONCE
        long = [pool.submit(answer, 11 + number, LONG_TOKENS, TIMEOUT_S) for number in range(AT_ONCE)]
        assert [one.result() for one in long] == [4] * AT_ONCE
