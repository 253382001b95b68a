"""A draft model in a real cluster: the same tokens as without, across crashes of every process that holds its KV."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import pathlib
import signal
import tempfile

import pytest
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import AMID_STEPS, ServedCluster, served
from lab.testbed.conditions import wait_for
from lab.testbed.draft_models import first_layers, with_quiet_layers
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from tests.support.cpu_model import needs_kernels
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.cluster, needs_kernels]

FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB", "--chunk-size", "64")
TOKENS = 250


def answer(cluster: ServedCluster, seed: int) -> list[int]:
    with Client(cluster.target) as client:
        stream = client.generate(byte_prompt(seed, 90), temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        return list(itertools.chain.from_iterable(delta.token_ids for delta in stream))


@pytest.mark.long
def test_kills_lose_no_token(tmp_path: pathlib.Path) -> None:
    base = save_model(tmp_path / "base", num_hidden_layers=6)
    main = with_quiet_layers(base, tmp_path / "main", 2, 0.05)
    draft = first_layers(main, tmp_path / "draft", 2)
    config = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4})
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(main))
    flags = (*FLAGS, "--speculative-config", config)
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), str(main), *flags, faults=True) as cluster,
    ):
        assert not first_difference(oracle.greedy(byte_prompt(0, 90), TOKENS), answer(cluster, 0), 1e-3)
        wait_for("all slots back", cluster.idle)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for seed, role in enumerate(("decode", "kvnode"), 1):
                # A step gives a stream at most five tokens, so neither stream ends within half of the fewest steps.
                cluster.arm(TOKENS // 5 // 2, signal.SIGKILL, point=AMID_STEPS, victim=role)
                streams = [pool.submit(answer, cluster, seed) for _ in range(2)]
                cluster.struck()
                alone = streams[0].result()
                assert not first_difference(oracle.greedy(byte_prompt(seed, 90), TOKENS), alone, 1e-3)
                assert streams[1].result() == alone
        wait_for("all slots back", cluster.idle)
