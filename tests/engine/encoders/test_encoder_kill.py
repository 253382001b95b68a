"""An encoder on real processes: its worker is killed, and each text of a list still gets one vector."""

from __future__ import annotations

import pathlib
import signal
import tempfile

import pytest

from lab.testbed.cluster import served
from lab.testbed.conditions import wait_for
from lab.testbed.tiny_model import byte_prompt
from pillion import Client
from tests.engine.encoders.test_encoder import make_encoder
from tests.engine.encoders.test_encoder_offline import pooled_by
from tests.support.text_streams import wait_until_texts_reach

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# A step has room for two of the longest texts.
FLAGS = ("--dtype", "float32", "--kv-pool-bytes", "16MiB", "--max-num-batched-prefill-tokens", "64")
TEXTS = [byte_prompt(seed, 20 + 5 * seed) for seed in range(15)]


def test_every_text_of_an_encoder_is_answered_once_after_a_kill(tmp_path: pathlib.Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    pooled_by(model, "mean_tokens")
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), str(model), *FLAGS, faults=True) as cluster,
        Client(cluster.target) as client,
    ):
        before = client.embed(TEXTS)
        for point in ("prefill, before a launch", "prefill, after a batch of deltas"):
            wait_until_texts_reach(cluster, client, "prefill")
            cluster.arm(3, signal.SIGKILL, point=point)
            found = client.embed(TEXTS)
            cluster.struck()
            assert [one.prompt_token_ids for one in found] == TEXTS
            # Each text is computed whole, so its bits do not depend on other texts.
            assert [one.outputs.embedding for one in found] == [one.outputs.embedding for one in before]
        wait_for("all slots back", cluster.idle)
