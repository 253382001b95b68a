"""Each alert fires when it should: not earlier, and not in a healthy cluster."""

from __future__ import annotations

import pytest
import yaml

from tests.support.alerts import MISSING, PROMTOOL, RULES, check_alerts

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)

PARTS = {f'pillion_build_info{{role="{role}"}}': "1+0x200" for role in ("gateway", "decode")}
MODEL = 'gen_ai_request_model="m"'


def components(**versions: str) -> dict[str, str]:
    """Return series of components in use, by version; the values are promtool's."""
    return {
        f'pillion_components{{version="{version}",protocol="8",used="yes"}}': values
        for version, values in versions.items()
    }


def histogram(name: str, bound: str, fast: str, every: str) -> dict[str, str]:
    return {f'{name}_bucket{{{MODEL},le="{bound}"}}': fast, f"{name}_count{{{MODEL}}}": every}


def requests(outcome: str, values: str) -> dict[str, str]:
    return {f'pillion_requests_total{{{MODEL},outcome="{outcome}"}}': values}


FIRST, TOKENS = "gen_ai_server_time_to_first_token_seconds", "pillion_inter_token_latency_seconds"
# By alert: series beside PARTS, minutes at which it does not fire yet, and minutes at which it does.
FIRES = {
    "PillionNoGateway": ({'pillion_build_info{role="gateway"}': "_x100"}, 0, 2),
    "PillionComponentDown": ({'pillion_component_down{component="decode-0"}': "0x4 1x20"}, 5, 8),
    "PillionForeignComponents": ({'pillion_components{version="9",protocol="9",used="no"}': "0x4 2x20"}, 5, 8),
    "PillionVersionsDiffer": (components(a="3x200", b="0x4 _x4 1x100"), 60, 72),
    "PillionNoDecodeWorker": ({'pillion_build_info{role="decode"}': "_x100"}, 0, 2),
    "PillionPartDown": ({'up{job="pillion",instance="a"}': "1x4 0x20"}, 5, 8),
    "PillionFencedParts": ({'pillion_kv_fenced_components{instance="a"}': "0x4 1x20"}, 5, 8),
    "PillionEventLoopHeld": ({'pillion_event_loop_longest_callback_seconds{instance="a"}': "0.1x4 0.9x20"}, 8, 12),
    "PillionIndexAway": ({'pillion_index_available{instance="a"}': "1x4 0x20"}, 5, 8),
    "PillionRegistryTakesNothing": ({'pillion_registry_writable{instance="a"}': "1x4 0x20"}, 5, 8),
    "PillionSlowFirstTokens": (histogram(FIRST, "2.5", "0+100x60 6000+70x90", "0+100x150"), 60, 140),
    "PillionSlowTokens": (histogram(TOKENS, "0.1", "0+100x60 6000+70x90", "0+100x150"), 60, 140),
    "PillionQueueGrows": ({'pillion_requests_now{state="waiting"}': "2x20 20+3x30"}, 20, 35),
    "PillionRefusals": (
        {'pillion_rejected_requests_total{reason="Unavailable"}': "0x20 0+10x40", **requests("stop", "0+100x60")},
        20,
        35,
    ),
    "PillionRequestsFail": ({**requests("stop", "0+100x60"), **requests("Internal", "0x20 0+10x40")}, 20, 35),
    "PillionReplays": (
        {f"pillion_replays_total{{{MODEL}}}": "0x20 0+10x40", **requests("stop", "0+100x60")},
        20,
        40,
    ),
    "PillionStepsFail": ({'pillion_steps_total{instance="a",outcome="failed"}': "0x20 1x20"}, 20, 22),
    "PillionKvPoolFull": ({'pillion_kv_usage_ratio{instance="a"}': "0.5x20 0.97x20"}, 22, 28),
    "PillionKvTierPaused": ({'pillion_kv_paused_tiers{instance="a"}': "0x20 1x20"}, 21, 24),
    "PillionKvCorrupt": ({'pillion_kv_corrupt_blocks_total{instance="a"}': "0x20 1x20"}, 20, 22),
}


def test_every_alert_has_its_series() -> None:
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert sorted(rules) == sorted(FIRES)


@pytest.mark.parametrize("name", FIRES)
def test_an_alert_fires_after_its_time_and_not_before(name: str) -> None:
    series, quiet, fires = FIRES[name]
    check_alerts(PARTS | series, [(name, quiet, 0), (name, fires, 1)])


def test_nothing_fires_in_a_healthy_cluster() -> None:
    series = PARTS | components(a="3x200")
    series |= histogram(FIRST, "2.5", "0+100x200", "0+100x200") | histogram(TOKENS, "0.1", "0+100x200", "0+100x200")
    series |= requests("stop", "0+100x200") | requests("length", "0+10x200")
    series |= {'pillion_requests_now{state="waiting"}': "4x200", 'up{job="pillion",instance="a"}': "1x200"}
    check_alerts(series, [(name, minutes, 0) for name in FIRES for minutes in (3, 70, 180)])


def test_an_upgrade_that_ends_within_the_hour_is_no_skew() -> None:
    upgrade = components(a="3x10 2x20 1x20 0x200", b="_x10 1x20 2x20 3x200")
    check_alerts(PARTS | upgrade, [("PillionVersionsDiffer", minutes, 0) for minutes in (11, 40, 200)])
    stands = components(a="3x10 2x200", b="_x10 1x200")
    check_alerts(PARTS | stands, [("PillionVersionsDiffer", 60, 0), ("PillionVersionsDiffer", 75, 1)])


def test_a_version_of_one_protocol_number_more_counts_as_another() -> None:
    mixed = {
        f'pillion_components{{version="{version}",protocol="{protocol}",used="yes"}}': "2x200"
        for version, protocol in (("0.2.0", "7"), ("0.2.0", "8"))
    }
    check_alerts(PARTS | mixed, [("PillionVersionsDiffer", 70, 1)])
