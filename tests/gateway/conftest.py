"""Long timeouts for gateways of this process; a test of one of these limits sets it itself."""

from __future__ import annotations

import pytest

from lab.testbed.conditions import WITHIN_S

LIMITS = (
    "gateway.anthropic.anthropic_api.EPHEMERAL_WAIT_S",
    "gateway.links.cluster.MAX_FETCH_S",
    "gateway.prefix_pins.prefix_pins.EPHEMERAL_WAIT_S",
    "gateway.request.events.MAX_REMOTE_ADMISSION_WAIT_S",
    "gateway.tokens.chat_template.RENDER_WALL_S",
    "kvstore.client.node_client.PREFETCH_GRACE_S",
)


@pytest.fixture(autouse=True)
def patient_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent fallbacks (e.g. computing instead of fetching) on a stalled machine."""
    for limit in LIMITS:
        monkeypatch.setattr(f"pillion.{limit}", WITHIN_S)
