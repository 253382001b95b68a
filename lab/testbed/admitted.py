"""Admitted requests for what needs one without a gateway: fleets and tests."""

from __future__ import annotations

from typing import Any

from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.request.admitted_request import AdmittedRequest, GatewayOptions
from pillion.types import GenerateRequest, SamplingParams


def admitted_request(
    prompt: tuple[int, ...] = (),
    max_tokens: int = 1,
    stop_token_ids: tuple[int, ...] = (),
    *,
    max_attempts: int = 4,
    arrived: float = 0.0,
    **more: Any,
) -> AdmittedRequest:
    """Make a request; ``more`` are other fields of AdmittedRequest."""
    fields: dict[str, Any] = {
        "asked": GenerateRequest(),
        "sampling": SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        "options": GatewayOptions(
            policy=parse_policy("auto"),
            chunk_tokens=1,
            max_attempts=max_attempts,
            max_inflight_requests=1,
            max_inflight_tokens=1,
            prefix_caching=True,
        ),
        **more,
    }
    return AdmittedRequest(
        request_id="r",
        answer_id="a",
        model="toy",
        fingerprint="",
        prompt=prompt,
        cache_salt="",
        arrived=arrived,
        deadline=None,
        spread=0,
        **fields,
    )
