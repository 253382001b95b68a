"""Several answers from the real components: each equals the answer to a single request with its seed (I6)."""

from __future__ import annotations

import pathlib
import tempfile

from lab.testbed.tiny_model import save_model
from pillion import Delta
from tests.support.components import running_components

PROMPT = list(range(2, 91))
SEED = 2**63 - 2
ASKED = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8}


async def read(stream) -> list[Delta]:
    return [delta async for delta in stream]


def ids_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [one for delta in deltas if delta.index == index for one in delta.token_ids]


async def test_each_answer_matches_its_seed(tmp_path: pathlib.Path) -> None:
    model = {"model": str(save_model(tmp_path / "tiny")), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        async with running_components(pathlib.Path(folder), model=model, gateway={"chunk_size": 32}) as components:
            client = components.client
            several = await read(client.generate(PROMPT, n=4, seed=SEED, logprobs=1, **ASKED))
            last = several[-1]
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (89, 48)
            assert (last.timings.cached_tokens, last.timings.prefilled_tokens, last.timings.replays) == (0, 80, 0)
            means = []
            for index in range(4):
                # The next seed wraps around as a 64-bit number.
                seed = (SEED + index + 2**63) % 2**64 - 2**63
                alone = await read(client.generate(PROMPT, seed=seed, logprobs=1, **ASKED))
                assert ids_of(several, index) == ids_of(alone)
                logprobs = [one for delta in several if delta.index == index for one in delta.logprobs]
                assert [one.token_id for one in logprobs] == ids_of(alone)
                assert all(len(one.top_ids) == 1 and one.top_logprobs[0] >= one.logprob for one in logprobs)
                means.append(sum(one.logprob for one in logprobs) / len(logprobs))
            assert len({tuple(ids_of(several, index)) for index in range(4)}) == 4
            ranks = sorted(range(4), key=lambda index: -means[index])
            best = await read(client.generate(PROMPT, n=2, best_of=4, seed=SEED, **ASKED))
            assert [ids_of(best, index) for index in (0, 1)] == [ids_of(several, index) for index in ranks[:2]]
            await components.proven()

            stream = client.generate(PROMPT, n=4, max_tokens=400, ignore_eos=True)
            async for delta in stream:
                if delta.token_ids:
                    break
            await stream.aclose()
            await components.proven()
            assert (await client.status()).active_requests == 0

            async with components.another_gateway(enable_prefix_caching=False) as other:
                for _ in range(2):
                    alone = await read(other.generate(PROMPT, n=2, seed=SEED, **ASKED))
                    assert [ids_of(alone, index) for index in (0, 1)] == [ids_of(several, index) for index in (0, 1)]
                    assert alone[-1].usage.cached_tokens == 0
            await components.proven()
