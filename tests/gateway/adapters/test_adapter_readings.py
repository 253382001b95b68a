"""Gauges of running adapters, in the form that vLLM's dashboards read."""

from __future__ import annotations

from pillion.gateway.adapters.adapter_names import adapter_readings
from pillion.observability.metrics import Meters
from tests.pillion.observability.test_meters import samples


def test_vllms_list_of_running_adapters() -> None:
    meters = Meters()
    meters.watch(lambda: adapter_readings({"red": 2, "blue": 1, "idle": 0}, 4))
    found = samples(meters) | samples(meters, vllm_names=True)
    assert found["pillion_adapter_requests_now", (("adapter", "red"),)] == 2
    labels = ("max_lora", "4"), ("running_lora_adapters", "blue,red"), ("waiting_lora_adapters", "")
    assert found["vllm:lora_requests_info", labels] > 0
    assert not any("idle" in str(key) for key in found)
