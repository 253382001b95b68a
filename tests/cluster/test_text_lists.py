"""Lists of texts on real processes: prefill workers compute them, or decode workers where there is no prefill worker. A
worker is killed amid each list, and every text has its own vector, once.
"""

from __future__ import annotations

import pathlib
import signal
import tempfile
from collections.abc import Iterator

import pytest

from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import wait_for
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from tests.support.text_streams import wait_until_texts_reach

pytestmark = pytest.mark.cluster

# Small steps, so that a list takes many.
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB"),
    *(
        "--chunk-size",
        "64",
        "--max-num-batched-prefill-tokens",
        "64",
        "--max-num-batched-tokens",
        "32",
        "--max-num-seqs",
        "32",
    ),
)
TEXTS = [byte_prompt(seed, 20 + 17 * seed) for seed in range(14)]
TEXTS += [[*TEXTS[12], 9], [*TEXTS[13][:96], 7, 8], TEXTS[3]]


@pytest.fixture
def cluster(role: str, tmp_path: pathlib.Path) -> Iterator[ServedCluster]:
    """Run a cluster in which workers of the role compute texts."""
    model = str(save_model(tmp_path / "tiny"))
    disaggregated = role == "prefill"
    split = ("--split-policy", "disaggregated") if disaggregated else ("--split-policy", "colocated")
    alone = () if disaggregated else ("--prefill-workers", "0")
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), model, *FLAGS, *split, *alone, faults=True) as running,
    ):
        yield running


@pytest.mark.parametrize(
    ("role", "what", "passing"),
    [("prefill", "after a batch of deltas", 5), pytest.param("decode", "before a launch", 6, marks=pytest.mark.long)],
)
def test_every_text_is_answered_once_after_a_kill(cluster: ServedCluster, role: str, what: str, passing: int) -> None:
    point = f"{role}, {what}"
    with Client(cluster.target) as client:
        before = client.embed(TEXTS, cache_salt=f"before {point}")
        wait_until_texts_reach(cluster, client, role)
        cluster.arm(passing, signal.SIGKILL, point=point)
        found = client.embed(TEXTS, cache_salt=f"after {point}")
        cluster.struck()
        assert [one.prompt_token_ids for one in found] == TEXTS
        for one, wanted in zip(found, before, strict=True):
            assert one.outputs.embedding == pytest.approx(wanted.outputs.embedding, abs=1e-5)
        vectors = [tuple(one.outputs.embedding) for one in before]
        assert len(set(vectors)) == len(TEXTS) - 1, "each text has a vector of its own"
        assert client.embed(TEXTS[:2], cache_salt=f"later {point}")[1].outputs.embedding == pytest.approx(
            before[1].outputs.embedding, abs=1e-5
        )
    wait_for("all slots back", cluster.idle)
