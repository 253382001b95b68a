"""Streams that end with the vector of their text, as a gateway requests them from a worker."""

from __future__ import annotations

import numpy as np

from lab.testbed.cluster import ServedCluster
from lab.testbed.conditions import wait_for
from lab.testbed.faults.points import BY_NAME
from pillion import Client
from pillion.kernels.step import StepBatch
from pillion.types import FinishReason
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, kv_of
from tests.support.workers import Answer, Connection, Workers, submit_of

PROMPT = [(position * 7 + 3) % VOCAB_SIZE for position in range(41)]


class VectorBackend(FakeBackend):
    """The vector of a row is its KV and its position; rows at position ``broken_at`` have NaN."""

    gives_vectors = True
    broken_at = -1

    def _read_vectors(self, batch: StepBatch) -> np.ndarray:
        rows = batch.sample_rows[len(batch.sample_rows) - batch.pooled :]
        positions = batch.positions[rows].astype(np.float32)
        found = np.stack([self._last_kv[rows].astype(np.float32), positions], 1)
        found[positions == self.broken_at] = np.nan
        return found


def vector_of(tokens: list[int]) -> list[float]:
    """Return the backend's vector of a text."""
    last = len(tokens) - 1
    return [float(np.float32(kv_of(np.array(tokens[-1:]), np.array([last]))[0])), float(last)]


async def ask(workers: Workers, connection: Connection, key: int, tokens: list[int], **other: object) -> Answer:
    ticket = await workers.ticket(tokens)
    fields = {"max_tokens": 0, "pooled": True, **other}
    answer = await connection.submit(submit_of(key, ticket, tokens, **fields))
    await answer.ended()
    await workers.release(ticket)
    return answer


def read(answer: Answer) -> list[float]:
    assert answer.last is not None
    assert (answer.last.finish_reason, answer.token_ids) == (FinishReason.LENGTH, [])
    found: list[float] = np.frombuffer(answer.last.vector, "<f4").tolist()
    return found


def wait_until_texts_reach(cluster: ServedCluster, client: Client, role: str) -> None:
    """Wait until the gateway sends texts to a worker of a role, which it may discover late."""
    point = BY_NAME[f"{role}, before a batch of deltas"]

    def reached() -> bool:
        before = cluster.board.passings(point)
        client.embed([[5]])
        return cluster.board.passings(point) > before

    wait_for(f"a text to reach a {role} worker", reached)
