"""Sends a bundle's request again and compares the answers: `pillion replay`.

    bundle --model_of, request_of--> request --ReplayClient--> answers --first_difference--> equal, or where it differs

Messages of a chat are sent as they came, if the bundle has them, so that the gateway parses answers as it did before.
If it makes another prompt of them because its template changed, the recorded token ids are sent instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pillion.errors import ConfigError
from pillion.records.bundle import Bundle, BundleModel
from pillion.records.comparison import first_difference
from pillion.records.replay_client import Replayed, replay_client
from pillion.types import MAX_LOGPROBS, MAX_REPORTED, GenerateRequest, ModelInfo, StructuredOutputs, Timings

# Prefix of the request ids of replays.
LABEL = "replay-"


async def run_replay(
    bundle: Bundle,
    verified: bool,
    reach: dict[str, Any],
    model: str,
    any_model: bool,
    plan: str,
    say: Callable[[str], None],
) -> int:
    """Replay one bundle and print the result; the last line says whether the answers are equal. Return the exit status:
    0 if they are, else 1.

    Args:
        verified: whether the bundle's HMAC was verified.
        reach: arguments of :class:`pillion.AsyncClient`.
        model: the target's name of the model; "": the one with the recorded weights, else with the recorded name.
        any_model: whether other weights than the recorded ones may be used.
        plan: restrictions of the target's planner; "": none.

    Raises ConfigError if it cannot be replayed, and PillionError if the target does not answer.
    """
    refuse(bundle)
    say(f"{bundle.id}: {'verified' if verified else 'unverified, for there is no key of the deployment'}")
    async with replay_client(**reach, plan=plan) as client:
        info = model_of(bundle, await client.models(), model, any_model)
        replayed = await client.answer(request_of(bundle, info), bundle, info, recorded=True)
        if not replayed.same_prompt:
            say("the target makes another prompt of the same messages; the recorded token ids are sent instead")
            replayed = await client.answer(request_of(bundle, info, as_ids=True), bundle, info, recorded=True)
    for line in times(bundle, replayed):
        say(line)
    difference = first_difference(bundle.answers, replayed.answers)
    tokens = sum(len(answer.token_ids) for answer in bundle.answers)
    say(f"equal: {len(bundle.answers)} answers, {tokens} tokens" if difference is None else f"differs: {difference}")
    return int(difference is not None)


def refuse(bundle: Bundle) -> None:
    """Raise ConfigError for a bundle that cannot be replayed."""
    if bundle.content != "full":
        raise ConfigError(
            f"the bundle {bundle.id} cannot be replayed: its content is {bundle.content!r}, and a replay needs the"
            " token ids, which --record-content full keeps"
        )
    if bundle.request.operation == "embeddings":
        raise ConfigError(f"the bundle {bundle.id} has no answer to replay: the request asked for a vector")
    if not any(answer.tokens or answer.finish_reason for answer in bundle.answers):
        raise ConfigError(f"the bundle {bundle.id} has no answer to replay: {bundle.error or 'none began'}")


def model_of(bundle: Bundle, models: Sequence[ModelInfo], name: str, any_model: bool) -> ModelInfo:
    """Return the target's model for a replay: the one called ``name``; if that is "", one with the recorded weights and
    adapter, else with the recorded name. Raises ConfigError if there is none, or if it has other weights and
    ``any_model`` is false."""
    recorded = bundle.model
    called = name or recorded.asked or recorded.name
    same = [one for one in models if (one.fingerprint, one.adapter) == (recorded.fingerprint, recorded.adapter)]
    named = [one for one in (models if name or not same else same) if one.name == called]
    if not named and (name or not same):
        raise ConfigError(
            f"the target serves no model {called!r}, but {', '.join(one.name for one in models) or 'none'}"
        )
    chosen = (named or same)[0]
    if chosen not in same and not any_model:
        raise ConfigError(
            f"the target's {chosen.name!r} has other weights than the bundle's: {_weights(chosen)} instead of"
            f" {_weights(recorded)}; --any-model replays with them"
        )
    return chosen


def _weights(one: BundleModel | ModelInfo) -> str:
    return one.fingerprint[:10] + (f" with the adapter {one.adapter[:10]}" if one.adapter else "")


def request_of(bundle: Bundle, info: ModelInfo, *, as_ids: bool = False, priority: int = 0) -> GenerateRequest:
    """Return the request that generates a bundle's answers again, with log probabilities. Its sampling is the recorded
    one. ``as_ids``: send the recorded token ids instead of messages. Raises ConfigError if that is impossible."""
    asked = bundle.request
    as_ids = as_ids or not asked.messages
    sampling = asked.sampling
    if as_ids and asked.grammar and sampling.structured_outputs is None:
        sampling = replace(sampling, structured_outputs=StructuredOutputs(grammar=sent_grammar(asked.grammar)))
    # All generated answers are requested, even if the client only got the best.
    answers = len(bundle.answers)
    logprobs = min(MAX_LOGPROBS, MAX_REPORTED // answers - 1)
    sampling = replace(sampling, n=answers, best_of=None, logprobs=logprobs, prompt_logprobs=None)
    if as_ids:
        prompt: dict[str, Any] = {"token_ids": asked.token_ids}
        sampling = replace(sampling, truncate_prompt_tokens=None, truncation_side="")
    else:
        prompt = {"messages": asked.messages, "chat": asked.chat, "tools": asked.tools}
    return GenerateRequest(
        model=info.name, sampling=sampling, request_id=LABEL + bundle.id, priority=priority, **prompt
    )


def sent_grammar(text: str) -> str:
    """Return the grammar that a client sends so that workers get ``text``. Raises ConfigError if that is impossible."""
    if not text.startswith("{"):
        return text
    parts = {one["name"]: one["lark_grammar"] for one in json.loads(text)["grammars"]}
    client = parts.get("client")
    if client is None or "start: (@client)\n" not in parts.get("answer", ""):
        raise ConfigError("the answers followed both tool calls and a grammar, which a request with token ids cannot")
    return str(client)


def times(bundle: Bundle, replayed: Replayed) -> list[str]:
    """Return lines that compare the replay's times with the request's."""
    now = replayed.timings
    if now is None:
        return []
    then = bundle.timings or Timings()
    pairs = ((now.time_to_first_token_ms, then.time_to_first_token_ms), (now.total_ms, then.total_ms))
    first, whole = (f"{new:.0f} ms" + (f" ({old:.0f} ms then)" if old else "") for new, old in pairs)
    lines = [f"took {first} to the first token, {whole} in all", f"plan: {now.plan_reason}"]
    return lines + ([f"plan then: {then.plan_reason}"] if then.plan_reason else [])
