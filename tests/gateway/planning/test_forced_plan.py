"""Plans forced by operators on single requests: parsing and effect."""

from __future__ import annotations

import pathlib

import pytest

from pillion import AsyncClient
from pillion.errors import InvalidRequest, NotFound, PermissionDenied
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.planning.forced_plan import ForcedPlan, parse_plan
from pillion.gateway.planning.planner import make_plan
from tests.gateway.planning.test_planner import shape, snapshot
from tests.support.fake_components import running_fake_cluster, script_of

KEYS = {name: f"sk-{name}-{'0' * 32}" for name in ("ops", "acme")}


def test_the_syntax_of_a_plan() -> None:
    assert parse_plan("policy=fraction:1/2, node=kv-1") == ForcedPlan(parse_policy("fraction:1/2"), "kv-1")
    assert parse_plan("node=kv-1").policy is None
    wrong = ("", "x=1", "split", "split=-1", "split=x", "policy=best", "node=", "split=1,policy=auto", "node=a,node=b")
    for text in wrong:
        with pytest.raises(InvalidRequest, match="x-pillion-plan"):
            parse_plan(text)


@pytest.mark.parametrize(
    ("words", "hit", "expected"),
    [
        ("split=50", 0, (0, 48, (32, 16))),
        ("split=0", 0, (0, 0, ())),
        ("split=999999999", 0, (0, 96, (32, 32, 32))),
        ("split=50", 5, (80, 80, ())),
    ],
)
def test_a_forced_split_policy_sets_the_split(words: str, hit: int, expected: tuple[int, int, tuple[int, ...]]) -> None:
    policy = parse_plan(words).policy
    assert policy is not None
    seen = snapshot(hits={"kv-0": hit})
    seen.policy = policy
    assert shape(make_plan(seen)) == expected


async def test_only_operators_may_force_plans(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.toml"
    entries = [f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(key)}"\n' for name, key in KEYS.items()]
    file.write_text("[tenant.ops]\noperator = true\n[tenant.acme]\n" + "".join(entries))
    script = script_of("abc")
    async with running_fake_cluster("abc", api_keys=str(file)) as fakes:

        async def reason(name: str, plan: str) -> str:
            async with AsyncClient(fakes.gateway.grpc_address, api_key=KEYS[name], plan=plan) as client:
                deltas = [delta async for delta in client.generate(list(range(40, 80)))]
            assert [token for delta in deltas for token in delta.token_ids] == [*script]
            assert deltas[-1].timings is not None
            return deltas[-1].timings.plan_reason.partition(";")[0]

        assert await reason("ops", "") == await reason("acme", "")
        assert await reason("ops", "policy=colocated") == "colocated: co-located"
        assert await reason("ops", "split=17,node=kv-0") == "split:17: prefill-0 computes 16"
        for name, plan, error, words in (
            ("ops", "node=kv-9", NotFound, "kv-9"),
            ("ops", "split=all", InvalidRequest, "x-pillion-plan"),
            ("acme", "policy=colocated", PermissionDenied, "operator"),
        ):
            with pytest.raises(error, match=words):
                await reason(name, plan)
        await fakes.settled()
