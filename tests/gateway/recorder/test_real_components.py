"""Bundles of real components: the story matches the request, and the seed reproduces the answer."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

from lab.testbed.tiny_model import byte_prompt, save_model
from pillion.records.explanation import end_ms, phases, sentences
from tests.gateway.recorder.test_recorder import ids_of, recorded
from tests.support.components import running_components

TOKENS = 200
ASKED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "n": 2, "logprobs": 0}


async def test_a_bundle_matches_the_request(tmp_path: pathlib.Path) -> None:
    model = {"model": str(save_model(tmp_path / "tiny")), "dtype": "float32", "max_model_len": 512}
    folder = tmp_path / "records"
    gateway = {"record_path": str(folder), "record_share": 1.0, "record_content": "full", "chunk_size": 64}
    prompt = byte_prompt(3, TOKENS)
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model, gateway=gateway) as components:
            first = [delta async for delta in components.client.generate(prompt, **ASKED)]
            (cold,) = await recorded(folder)
            seed = cold.request.sampling.seed
            again = [delta async for delta in components.client.generate(prompt, **ASKED, seed=seed)]
            warm = (await recorded(folder, 2))[1]
            await components.proven()
    assert [answer.token_ids for answer in cold.answers] == [ids_of(first, index) for index in range(2)]
    assert warm.answers[0].token_ids == cold.answers[0].token_ids == ids_of(again, 0)
    assert warm.answers[1].token_ids == cold.answers[1].token_ids
    assert cold.request.token_ids == tuple(prompt)
    chunks = [event.tokens for event in cold.story if event.what == "chunk"]
    # The last chunk's acknowledgement may come after the answer's end.
    assert chunks in ([64, 128], [64, 128, 192])
    assert cold.timings.prefilled_tokens == 192
    assert "The prefix was cold: none of the prompt's 200 tokens was cached." in sentences(cold)
    cached = warm.usage.cached_tokens
    assert cached
    assert f"Of the prompt's 200 tokens {cached} were cached ({cached} were in the pool)." in sentences(warm)
    for bundle in (cold, warm):
        found = phases(bundle)
        assert (found[0].start_ms, found[-1].end_ms) == (0.0, end_ms(bundle))
        assert {one.kernels != "" for one in bundle.workers} == {True}
        assert {event.what for event in bundle.story} >= {"ready", "turn", "planned", "submitted", "tokens"}
