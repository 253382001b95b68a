"""vLLM's metric names and labels, as its dashboards and autoscalers read them, on the gateway's page."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from pillion.gateway.links.cluster import Cluster
from pillion.wire.registry import ComponentRecord
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

# Names in vllm/v1/metrics/loggers.py, without those of single steps, drafts, adapters and the process.
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
COUNTERS = {
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens"),
    *("vllm:generation_tokens", "vllm:request_success"),
}
HISTOGRAMS = {
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
    *("vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:time_to_first_token_seconds"),
    *("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    *("vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"),
    *("vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds"),
    *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
}


async def test_a_gateways_page_has_vllms_names_with_the_model() -> None:
    async with running_fake_cluster("The answer.") as fakes:
        address = fakes.gateway.http_address
        idle = families((await call(address, "/metrics")).body)
        assert {name for name in GAUGES if (name, "gauge") in idle} >= {
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        }
        assert (await call(address, "/v1/completions", {"prompt": "xyz", "max_tokens": 5, "n": 2})).status == 200
        await fakes.settled()
        found = families((await call(address, "/metrics")).body)
    kinds = {"gauge": GAUGES - {"vllm:kv_cache_usage_perc"}, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, wanted in kinds.items():
        for name in wanted:
            samples = found[name, kind]
            assert samples, name
            assert {sample.labels["model_name"] for sample in samples} == {"toy"}, name
    sums = {sample.name: sample.value for samples in found.values() for sample in samples}
    assert sums["vllm:request_prompt_tokens_sum"] == 3
    assert sums["vllm:request_generation_tokens_count"] == 2
    assert sums["vllm:request_params_max_tokens_sum"] == 5
    assert sums["vllm:request_params_n_sum"] == 2


def families(page: bytes) -> dict[tuple[str, str], list]:
    return {(one.name, one.type): one.samples for one in text_string_to_metric_families(page.decode())}


def test_queues_and_pools_are_per_model() -> None:
    cluster = Cluster("g", SimpleNamespace(refusal=""), None, 5.0)  # type: ignore[arg-type]
    assert (cluster.queued_requests("one"), cluster.kv_usage("one")) == (0, None)
    worker = ComponentRecord(
        component_id="d0", role="decode", address="x", model="one", node_id="n0", running_requests=6, waiting_requests=4
    )
    node = ComponentRecord(
        component_id="n0",
        role="kvnode",
        address="x",
        node_id="n0",
        total_blocks=100,
        leased_blocks=10,
        pinned_blocks=15,
    )
    records = [
        worker,
        replace(worker, component_id="d1", waiting_requests=0),
        replace(worker, component_id="d2", model="two", node_id="n2"),
        replace(worker, component_id="p0", role="prefill", node_id="n1"),
        node,
        replace(node, component_id="n1", node_id="n1", leased_blocks=0, pinned_blocks=0, quarantined_blocks=5),
        replace(node, component_id="n2", node_id="n2", leased_blocks=90),
    ]
    cluster.view.update(records, 0.0)
    # Half of the streams at d0 are this gateway's, and so is half of its queue.
    cluster.load.add("d0", 5)
    cluster.load.add("d1", 6)
    assert cluster.queued_requests("one") == 2
    assert cluster.kv_usage("one") == (10 + 15 + 5) / 200
    assert cluster.kv_usage("two") == 1.0
