"""Streams that end with the vector of their text, over a real node and real gRPC: with hits, beside others, refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pillion.kernels.step import StepBatch
from pillion.v1.decode_pb2 import Sibling
from tests.support.fake_backend import VOCAB_SIZE, greedy, kv_of
from tests.support.text_streams import PROMPT, VectorBackend, ask, read, vector_of
from tests.support.workers import GREEDY, connected, running_workers, submit_of


async def test_vectors_of_chunked_and_cached_texts() -> None:
    async with (
        running_workers(decode={"max_num_batched_tokens": 16, "max_num_seqs": 4}, backend=VectorBackend) as workers,
        connected(workers) as connection,
    ):
        assert read(await ask(workers, connection, 1, PROMPT)) == vector_of(PROMPT)
        assert read(await ask(workers, connection, 2, PROMPT)) == vector_of(PROMPT)
        longer = [*PROMPT, 5, 6, 7, 8, 9]
        assert read(await ask(workers, connection, 3, longer)) == vector_of(longer)
        assert read(await ask(workers, connection, 4, [9])) == vector_of([9])
        await workers.quiet()


@pytest.mark.parametrize("rows", [(0, 41), (0, 1), (3, 20), (40, 1)], ids=str)
async def test_the_mean_of_some_rows_whole_and_in_chunks(rows: tuple[int, int]) -> None:
    first, count = rows
    positions = np.arange(first, first + count)
    kv = kv_of(np.array(PROMPT)[positions], positions).astype(np.float32)
    wanted = [float(kv.mean(dtype=np.float64)), float(positions.mean())]
    fields = {"pooled": False, "pooled_first": first, "pooled_rows": count}
    bits = set()
    for budget in (64, 16, 7):
        async with (
            running_workers(
                decode={"max_num_batched_tokens": budget, "max_num_seqs": 4}, backend=VectorBackend
            ) as workers,
            connected(workers) as connection,
        ):
            found = read(await ask(workers, connection, 1, PROMPT, **fields))
            assert found == pytest.approx(wanted, rel=1e-6)
            bits.add(np.array(found, np.float32).tobytes())
            await workers.quiet()
            # The text's blocks are cached now; a ticket that pins rows to be pooled is refused: plan again.
            again = await ask(workers, connection, 2, PROMPT, **fields)
            if first < 40:
                assert again.last is not None
                assert again.last.error is not None
                assert (again.last.error.retryable, "to be scored" in again.last.error.message) == (True, True)
            await workers.quiet()
    assert len(bits) == 1


async def test_texts_share_steps_with_streams_and_get_their_own_vectors() -> None:
    async with running_workers(backend=VectorBackend) as workers, connected(workers) as connection:
        texts = [PROMPT[:count] for count in (5, 9, 12)]
        streams = [await connection.submit(submit_of(1, await workers.ticket(PROMPT), PROMPT, max_tokens=6))]
        asked = []
        for key, text in enumerate(texts, 2):
            fields = {"max_tokens": 0, "pooled": True}
            asked.append(await connection.submit(submit_of(key, await workers.ticket(text), text, **fields)))
        for one in (*streams, *asked):
            await one.ended()
        assert [read(one) for one in asked] == [vector_of(text) for text in texts]
        assert streams[0].token_ids == greedy(PROMPT, 6)
        assert streams[0].last is not None
        assert streams[0].last.vector == b""


async def test_a_nan_vector_fails_only_its_text() -> None:
    class NoNumber(VectorBackend):
        broken_at = 8

    async with running_workers(backend=NoNumber) as workers, connected(workers) as connection:
        bad = await ask(workers, connection, 1, PROMPT[:9])
        assert bad.last is not None
        assert bad.last.error is not None
        assert (bad.last.error.retryable, "the embedding is not finite" in bad.last.error.message) == (False, True)
        assert read(await ask(workers, connection, 2, PROMPT[:8])) == vector_of(PROMPT[:8])
        await workers.quiet()


class LogitBackend(VectorBackend):
    """Logits of rows are FakeBackend's."""

    def _read_vectors(self, batch: StepBatch) -> np.ndarray:
        assert not all(batch.pooled_ids), "rows of logits need no hidden states"
        return super()._read_vectors(batch)


async def test_requested_token_logits_replace_the_vector() -> None:
    async with running_workers(backend=LogitBackend) as workers, connected(workers) as connection:
        (after,) = greedy(PROMPT, 1)
        others = [one for one in (5, 6) if one != after]
        found = read(await ask(workers, connection, 1, PROMPT, pooled_ids=[*others, after]))
        assert len(found) == len(others) + 1
        assert found[-1] > max(found[:-1])
        assert read(await ask(workers, connection, 2, PROMPT, pooled_ids=[after, *others])) == [found[-1], *found[:-1]]
        assert read(await ask(workers, connection, 3, PROMPT)) == vector_of(PROMPT)
        bad = await ask(workers, connection, 4, PROMPT, pooled_ids=[VOCAB_SIZE])
        assert bad.last is not None
        assert bad.last.error is not None
        assert "pooled_ids: an id is outside the vocabulary" in bad.last.error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"siblings": (Sibling(key=9, seed=1),)},
        {"sampling": replace(GREEDY, prompt_logprobs=1)},
        {"pooled": False, "pooled_rows": 3, "max_tokens": 1},
    ],
    ids=["tokens", "parallel_samples", "scores", "mean"],
)
async def test_texts_with_generation_options_are_refused(fields: dict[str, object]) -> None:
    async with running_workers(backend=VectorBackend) as workers, connected(workers) as connection:
        answer = await ask(workers, connection, 1, PROMPT, **fields)
        assert answer.last is not None
        assert answer.last.error is not None
        assert "pooled: a stream that ends with a vector generates nothing" in answer.last.error.message


async def test_rows_outside_the_text_are_refused() -> None:
    async with running_workers(backend=VectorBackend) as workers, connected(workers) as connection:
        answer = await ask(workers, connection, 1, PROMPT, pooled=False, pooled_first=40, pooled_rows=2)
        assert answer.last is not None
        assert answer.last.error is not None
        assert "pooled_rows: rows up to 42 of 41 tokens" in answer.last.error.message


async def test_texts_at_a_backend_without_vectors_fail_for_good() -> None:
    async with running_workers() as workers, connected(workers) as connection:
        answer = await ask(workers, connection, 1, PROMPT)
        assert answer.last is not None
        assert answer.last.error is not None
        assert (answer.last.error.retryable, "has no vectors of texts" in answer.last.error.message) == (False, True)
