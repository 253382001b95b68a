"""Prompt log probabilities over real gRPC with scripted peers: once for all answers, after losses, bounded."""

from __future__ import annotations

import pytest

from lab.testbed.admitted import admitted_request
from pillion import Delta, FinishReason, InvalidRequest, Overloaded
from pillion.gateway.admission.admission import Admission
from pillion.gateway.request.request_runner import MAX_DELTA_LOGPROBS, Outbox
from pillion.types import MAX_PROMPT_LOGPROBS, TokenLogprob
from tests.support.fake_components import FakeCluster, knows, running_fake_cluster

PROMPT = tuple(range(33, 73))


async def ask(fakes: FakeCluster, **fields) -> list[Delta]:
    fields = {"prompt_logprobs": 2, "max_tokens": 4, "seed": 40, **fields}
    return [delta async for delta in fakes.client.generate(PROMPT, **fields)]


def check_scores(deltas: list[Delta]) -> None:
    """Check that each token but the first is scored once, in order, before all answer tokens."""
    scores = [one for delta in deltas for one in delta.prompt_logprobs]
    assert [(one.token_id, one.logprob, one.rank) for one in scores] == [
        (token, -place / 64, 2) for place, token in enumerate(PROMPT) if place
    ]
    assert all(one.top_ids == (one.token_id, one.token_id + 1) for one in scores)
    kinds = [bool(delta.prompt_logprobs) for delta in deltas]
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 2, "best_of": 3}, {"max_tokens": 0, "n": 2}], ids=str)
async def test_a_prompt_is_scored_once_for_all_answers(fields) -> None:
    async with running_fake_cluster("Paris, of course") as fakes:
        knows(fakes, kv_0=3)
        fakes.node.pinned = 3
        deltas = await ask(fakes, **fields)
        check_scores(deltas)
        answers, most = fields.get("n", 1), fields.get("max_tokens", 4)
        ends = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason}
        assert ends == dict.fromkeys(range(answers), FinishReason.LENGTH)
        tokens = [one for delta in deltas for one in delta.token_ids]
        assert len(tokens) == answers * most
        (submit,) = fakes.decode.submits
        assert (submit.scored_tokens, submit.awaited_blocks) == (0, 0)
        assert deltas[-1].usage.completion_tokens == fields.get("best_of", answers) * most
        assert (deltas[-1].usage.cached_tokens, deltas[-1].timings.tail_tokens) == (0, len(PROMPT))
        await fakes.settled()


async def test_prompt_scoring_resumes_where_a_worker_was_lost() -> None:
    async with running_fake_cluster("Paris, of course") as fakes:
        fakes.decode.breaks_amid_scores = 2
        deltas = await ask(fakes, n=2)
        check_scores(deltas)
        assert [submit.scored_tokens for submit in fakes.decode.submits] == [0, 8, 16]
        assert [len(submit.siblings) for submit in fakes.decode.submits] == [1, 1, 1]
        assert deltas[-1].timings.replays == 2
        fakes.decode.submits.clear()
        fakes.decode.break_after = 3
        deltas = await ask(fakes, n=2)
        check_scores(deltas)
        assert [submit.scored_tokens for submit in fakes.decode.submits] == [0, 39, 39]
        await fakes.settled()


async def test_too_many_log_probabilities_are_refused_by_name() -> None:
    async with running_fake_cluster() as fakes:
        assert len(PROMPT) * 21 * 128 <= MAX_PROMPT_LOGPROBS
        with pytest.raises(InvalidRequest) as failure:
            [_ async for _ in fakes.client.generate([40] * 200, prompt_logprobs=20, n=128, max_tokens=1)]
        assert [one.field for one in failure.value.violations] == ["sampling.prompt_logprobs"]
        with pytest.raises(InvalidRequest, match="prompt_logprobs: 21 is not in"):
            await ask(fakes, prompt_logprobs=21)
        await fakes.settled()


def test_scores_count_in_admission() -> None:
    admission = Admission(10, 1000)
    first, second = admission.enter(), admission.enter()
    admission.weigh(first, 100, 800)
    assert (first.tokens, admission.tokens) == (100, 900)
    with pytest.raises(Overloaded):
        admission.weigh(second, 100, 100)
    admission.weigh(second, 100)
    admission.leave(first)
    admission.leave(second)
    assert admission.tokens == 0


def test_one_delta_has_a_bounded_number_of_scores() -> None:
    outbox, one = Outbox(admitted_request(), 1), TokenLogprob(1, -1.0, (1, 2, 3), (-1.0, -2.0, -3.0), 1)
    outbox.score([one] * 5000)
    taken = []
    while outbox.pending:
        taken.append(len(outbox.take().prompt_logprobs))
    assert (sum(taken), max(taken)) == (5000, MAX_DELTA_LOGPROBS // 4)
