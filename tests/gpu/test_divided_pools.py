"""GPU backends over a pool divided by KV heads: ranks with a shard each, and workers of other sizes over the same
shards. On a machine with one GPU all shards are on it; without one, Triton's interpreter computes."""

from __future__ import annotations

from tests.support.gpu_model import FakeDevicePool, FakeDividedPool, GpuDriver, gpu_backend, make_family  # isort: skip  (before the kernels)

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pillion.engine.backends.gpu.device_memory import distant_tensor
from pillion.engine.backends.gpu.pool_parts import parts_of
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError
from pillion.kvstore.memory.head_shares import shares_of
from tests.gpu.test_backend import close
from tests.gpu.test_ranks import parallel_answers
from tests.support.families import SAME_AT_ANY_LENGTH, tokens_of
from tests.support.gpu import NATIVE

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_cache")]

# One KV head, and latents: both shards have them.
INTERPRETED = ("llama-mqa-biases", "youtu")
SLOTS = 8


def in_one_piece(pool: FakeDividedPool, layout) -> torch.Tensor:
    """The canonical blocks [slots, rows, heads, bytes of a piece] of a divided pool."""
    rows = 2 * layout.num_layers
    piece = layout.block_bytes // (rows * layout.num_kv_heads)
    whole = torch.zeros(SLOTS, rows, layout.num_kv_heads, piece, dtype=torch.uint8)
    for share, shard in zip(pool.shares, pool.shards, strict=True):
        whole[:, :, share.start : share.stop] = shard.tensor.cpu().view(SLOTS, rows, len(share), piece)
    return whole


@pytest.mark.parametrize("family", SAME_AT_ANY_LENGTH if NATIVE else INTERPRETED)
def test_families(team, family, tmp_path):
    """Two ranks, each with a shard: a chunk, and a decode beside a chunk. Then one process reads what both have
    written, and continues; and the ranks continue after it."""
    folder, flags = make_family(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text, other = tokens_of(37, 2), tokens_of(9, 3)
    with torch.inference_mode():
        wanted, beside = (model(torch.tensor([tokens])).logits[0].float() for tokens in (text, other))
    ready = prepare(flags)
    driver = GpuDriver(ready, num_slots=SLOTS, backend=team.backend(ready), shards=2)
    one, two = driver.sequences.add(2)
    driver.step((one, text[:34]), sample=())
    got = driver.step((one, text[34:35]), (two, other), sample=range(10))
    close(got, torch.cat((wanted[34:35], beside)))
    alone = gpu_backend(ready)
    alone.bind_pool(driver.memory, SLOTS)
    alone.warm_up(1)
    close(alone.forward(driver.sequences.step([(one, text[35:36])])), wanted[35:36])
    close(driver.step((one, text[36:])), wanted[36:])
    alone.close()
    driver.backend.close()


@pytest.mark.parametrize("fp8", [False, True] if NATIVE else [True])
def test_one_process_writes_the_same_blocks_over_any_number_of_shards(prepared, fp8):
    """Bit by bit in the first layer; the next layers' inputs are sums of attention in another order."""
    text = tokens_of(34, 5)

    def run(shards: int) -> tuple[torch.Tensor, torch.Tensor]:
        driver = GpuDriver(prepared, num_slots=SLOTS, backend=gpu_backend(prepared, fp8=fp8), shards=shards)
        (number,) = driver.sequences.add()
        driver.step((number, text[:33]), sample=())
        logits = driver.step((number, text[33:]))
        layout, pool = driver.backend.layout, driver.memory
        if isinstance(pool, FakeDividedPool):
            return logits.cpu(), in_one_piece(pool, layout)
        return logits.cpu(), pool.tensor.cpu().view(SLOTS, 2 * layout.num_layers, layout.num_kv_heads, -1)

    expected, whole = run(0)
    # With more shards than KV heads, both shards of a head get its values.
    for shards in (2,) if fp8 else (2, 4):
        logits, blocks = run(shards)
        assert torch.equal(blocks[:, :2], whole[:, :2])
        if fp8:
            torch.testing.assert_close(logits, expected, atol=0.5, rtol=0.05)
        else:
            close(logits, expected)
            torch.testing.assert_close(
                blocks.view(torch.float32), whole.view(torch.float32), atol=1e-3, rtol=1e-3, equal_nan=True
            )


def test_another_gpus_memory_is_a_tensor_on_the_own_device(prepared):
    """torch would create a context on the other one."""
    pool = torch.arange(10, dtype=torch.uint8)
    memory = FakeDevicePool(0)
    memory.address, memory.size_bytes = pool.data_ptr(), len(pool)
    found = distant_tensor(memory, pool.device)
    assert found.device == pool.device
    assert torch.equal(found, pool)
    found[3] = 77
    assert pool[3] == 77
    answers = []
    for place in (0, 1):
        driver = GpuDriver(prepared, num_slots=SLOTS, backend=gpu_backend(prepared), shards=2)
        if place:
            driver.memory.shards[1].device_index = place
            driver.backend.bind_pool(driver.memory, SLOTS)
        answers.append(driver.step((driver.sequences.add()[0], tokens_of(20, 5))).cpu())
    assert torch.equal(*answers)


def test_parallel_samples_copy_blocks_in_every_shard(team, prepared):
    wanted = parallel_answers(GpuDriver(prepared, num_slots=16, backend=gpu_backend(prepared)))
    both = team.backend(prepared)
    assert parallel_answers(GpuDriver(prepared, num_slots=16, backend=both, shards=2)) == wanted
    both.close()
    alone = gpu_backend(prepared)
    assert parallel_answers(GpuDriver(prepared, num_slots=16, backend=alone, shards=2)) == wanted


def test_shards_that_are_too_small_are_refused(prepared):
    backend = gpu_backend(prepared)
    pool = FakeDividedPool(backend.layout, 4, 2)
    with pytest.raises(ConfigError, match="a pool of 5 blocks needs"):
        backend.bind_pool(pool, 5)


def sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks that can share it."""
    found = []
    for size in range(1, 9):
        with contextlib.suppress(ConfigError):
            ModelShard.of(config, 0, size)
            found.append(size)
    return found


@given(st.sampled_from([(2, 4), (2, 8), (1, 4), (4, 8), (3, 9)]), st.data())
def test_each_head_is_read_once_and_written_wherever_it_is(prepared, heads, data):
    kv_heads, num_heads = heads
    shape = {"num_kv_heads": kv_heads, "num_heads": num_heads, "intermediate_size": 512}
    config = replace(load_config(prepared.folder), **shape)
    size, count = data.draw(st.sampled_from(sizes(config))), data.draw(st.sampled_from(sizes(config)))
    shares = shares_of(kv_heads, count)
    shards = [ModelShard.of(config, rank, size) for rank in range(size)]
    every = [parts_of(config, shard, shares) for shard in shards]
    for shard, parts in zip(shards, every, strict=True):
        read = [head for part in parts if part.attended for head in part.heads]
        assert read == list(shard.kv_heads)
        for part in parts:
            assert part.shard_heads == shares[part.shard]
            assert set(part.heads) == set(part.shard_heads) & set(shard.kv_heads)
    written = {(part.shard, head) for parts in every for part in parts for head in part.heads}
    assert written == {(shard, head) for shard, share in enumerate(shares) for head in share}
    for shard in range(count):
        assert sum(part.copied for parts in every for part in parts if part.shard == shard) == 1
    if count == size:
        assert [[part.shard for part in parts] for parts in every] == [[rank] for rank in range(size)]
