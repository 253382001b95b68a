"""Simulated capacity: a queue of prompts lengthens steps, and nothing else does."""

from __future__ import annotations

from lab.benchmarks.capacity_sim import MACHINES, PEER_TOKENS, CapacityRun, Contender
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS
from pillion.loadgen.figures import percentile
from pillion.loadgen.load import LoadSession, Turn

COST = MACHINES["avx512"]
STREAMS = 24
# Longest plain step of the streams, with noise.
PLAIN_S = 1.15 * COST.plain_s(STREAMS, STREAMS * 300)


def sessions(at_s: float, prompts: int, tokens: int) -> list[LoadSession]:
    """Return streams that decode throughout, and prompts that arrive together."""
    streams = [LoadSession(0.0, (Turn(400, ids=[number] * 64),)) for number in range(STREAMS)]
    return streams + [LoadSession(at_s, (Turn(1, ids=[number] * tokens),)) for number in range(1000, 1000 + prompts)]


def served(contender: Contender, prompts: int, tokens: int) -> tuple[list[float], list[float], list[float]]:
    """Return gaps of the streams while prompts wait and afterwards, and times to the first token of the prompts."""
    at_s = 4.0
    records = CapacityRun(contender, sessions(at_s, prompts, tokens), 1).run().records
    late = [record for record in records if record.due_s == at_s]
    until_s = max(record.ended_s for record in late)
    during, after = [], []
    for record in records:
        if record.due_s < at_s:
            ends = [at for at, _ in record.messages[1:]]
            during += [gap for gap, end in zip(record.itl_s, ends, strict=True) if at_s < end <= until_s]
            after += [gap for gap, end in zip(record.itl_s, ends, strict=True) if end > until_s + 0.5]
    return during, after, [record.ttft_s for record in late]


def test_a_queue_of_prompts_lengthens_steps_while_it_lasts() -> None:
    during, after, _ = served(Contender("auto", COST), 40, 100)
    assert max(during) > 1.5 * AUTO_TARGET_STEPS * PLAIN_S
    assert max(after) <= PLAIN_S
    # Shorter than those of a peer that computes whole chunks.
    whole, _, _ = served(Contender("plain", COST, PEER_TOKENS, target_ms=0.0, first_come=True), 40, 100)
    assert max(during) < max(whole) / 2


def test_a_long_prompt_alone_stalls_no_stream() -> None:
    during, after, _ = served(Contender("auto", COST), 1, 3000)
    assert percentile(during, 99) <= AUTO_TARGET_STEPS * PLAIN_S
    assert max(after) <= PLAIN_S


def test_a_queue_waits_less_than_under_a_target_of_plain_gaps() -> None:
    _, _, auto = served(Contender("auto", COST), 40, 100)
    target_ms = AUTO_TARGET_STEPS * PLAIN_S * 1000
    _, _, bounded = served(Contender("bounded", COST, target_ms=target_ms), 40, 100)
    assert max(auto) < 0.9 * max(bounded)
