"""Cost of expressions in adapter configs: those that may backtrack for long are rejected, common ones are not."""

from __future__ import annotations

import pytest

from pillion.engine.adapters.pattern_cost import MAX_WAYS, count_ways


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r".*\.layers\.1\.(self_attn|mlp)\.(k_proj|down_proj)",
        r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|gate_up_proj).*",
        r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj",
        # Written by Unsloth.
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj"
        r"|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|q_proj)))",
    ],
)
def test_common_patterns_are_accepted(pattern):
    assert count_ways(pattern) <= MAX_WAYS


@pytest.mark.parametrize(
    "pattern",
    [
        r"(.*\.?)*!",
        "(a+)+b",
        "(a*)*",
        "(?:a|a){30}b",
        "(a|ab|b)*!",
        ".?" * 30 + "!",
        "(?:a|.)" * 30 + "!",
        ".*" * 6 + "!",
        "(?=(.*)*!)",
        "(?>(.*)*)!",
        "((?:a{0,9}){0,9}){0,9}b",
        "(a)?(?(1)(.*)*b|c)",
        "(?:" * 20 + "a?" + "){2}" * 20,
    ],
)
def test_patterns_that_may_backtrack_are_refused(pattern):
    assert count_ways(pattern) > MAX_WAYS
