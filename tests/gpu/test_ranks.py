"""A worker's GPU backend in two ranks, each a process, against transformers."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver  # isort: skip  (before the kernels)

import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.backends.backend import BackendLost
from pillion.engine.checkpoints.prepare import prepare
from testbed.tiny_model import save_model
from tests.gpu.test_backend import close, rows_of
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.gpu import NATIVE
from tests.support.gpu_ranks import RankTeam
from tests.support.mixed_adapters import mixed_steps, with_adapters

pytestmark = pytest.mark.usefixtures("own_cache")

# One family for each thing that ranks do in a way of their own: heads' norms; post norms, caps and windows; norms of
# whole projections; experts; a KV head that both ranks have, and biases of sums.
INTERPRETED = ("qwen3-qk-norm", "gemma2", "olmo2", "mixtral", "llama-mqa-biases")


@pytest.fixture(scope="module")
def team(own_cache):
    made = RankTeam(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prepared(own_cache, tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model") / "model")
    return prepare(ModelFlags(model=str(folder), dtype="float32"))


@pytest.mark.parametrize("family", FAMILIES if NATIVE else INTERPRETED)
def test_families(team, family, tmp_path):
    """A chunk, and then a decode beside a chunk of another text, over one pool."""
    folder, flags = make_model(tmp_path / "model", FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, other = tokens_of(40, 2), tokens_of(20, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    prepared = prepare(flags)
    driver = GpuDriver(prepared, num_slots=8, backend=team.backend(prepared))
    one, two = driver.sequences.add(2)
    driver.step((one, text[:39]), sample=())
    got = driver.step((one, text[39:]), (two, other), sample=range(21))
    close(got, torch.cat((wanted[39:], beside)))
    driver.backend.close()
