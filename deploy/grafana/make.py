"""Generate Grafana's dashboards/*.json: ``python -m deploy.grafana.make``, or ``make dashboards``.

    dashboards below --build--> Grafana's JSON --render--> text --main--> files

The output is deterministic. Tests compare the files and check the queries' metrics, labels and values. Edit dashboards
here: Grafana is configured not to save changes.
"""

from __future__ import annotations

import json
import pathlib

from deploy.grafana.model import Dashboard, Panel, Query, Variable, build

FOLDER = pathlib.Path(__file__).resolve().parent / "dashboards"
MODEL = 'gen_ai_request_model=~"$model"'
TOKENS_PER_S = "suffix: tokens/s"
# Adds the component's name to a series.
OWNER = '* on (job, instance) group_left (component) pillion_build_info{component=~"$component"}'
EVERY_OWNER = "* on (job, instance) group_left (component) pillion_build_info"
_QUANTILES = ((0.5, "p50"), (0.99, "p99"))


def rate(metric: str, where: str = "") -> str:
    """Return a counter's rate per second."""
    chosen = f"{{{where}}}" if where else ""
    return f"rate({metric}{chosen}[$__rate_interval])"


def rate_by(metric: str, by: str, where: str = "") -> str:
    """Return a counter's rate per second, summed over all labels but ``by``."""
    return f"sum by ({by}) ({rate(metric, where)})"


def latency(title: str, metric: str, text: str, where: str = MODEL) -> Panel:
    """Return a panel of p50 and p99 of a histogram in seconds."""
    inside = rate_by(f"{metric}_bucket", "le", where)
    queries = tuple(Query(f"histogram_quantile({quantile}, {inside})", name) for quantile, name in _QUANTILES)
    return Panel(title, "s", queries, text)


def latency_by_component(title: str, metric: str, text: str) -> Panel:
    """Return a panel of p50 and p99 of a histogram in seconds, by component."""
    inside = f"sum by (le, component) ({rate(f'{metric}_bucket')} {OWNER})"
    queries = tuple(
        Query(f"histogram_quantile({quantile}, {inside})", f"{name} {{{{component}}}}") for quantile, name in _QUANTILES
    )
    return Panel(title, "s", queries, text)


def by_component(metric: str) -> str:
    """Return a gauge by component."""
    return f"sum by (component) ({metric} {OWNER})"


def rate_by_component(metric: str, *labels: str) -> str:
    """Return a counter's rate by component or by ``labels``."""
    return f"sum by ({', '.join(labels or ('component',))}) ({rate(metric)} {OWNER})"


def mean(metric: str, where: str) -> str:
    """Return the mean of a histogram."""
    return f"sum({rate(f'{metric}_sum', where)}) / sum({rate(f'{metric}_count', where)})"


def _service() -> Dashboard:
    sources = "pillion_prompt_tokens_total"
    share = f"{rate_by(sources, 'source', MODEL)} / ignoring (source) group_left () sum({rate(sources, MODEL)})"
    latencies = (
        latency(
            "Time to first token",
            "gen_ai_server_time_to_first_token_seconds",
            "Queue time, prefill and one decode step. The first latency to rise when prefill workers are too few.",
        ),
        latency(
            "Inter-token latency",
            "pillion_inter_token_latency_seconds",
            "Time between tokens of a stream. Rises with decodes per worker and with the token budget.",
        ),
        latency(
            "Time per output token",
            "gen_ai_server_time_per_output_token_seconds",
            "Mean per answer after the first token. Hides single pauses in long answers.",
        ),
        latency(
            "Whole request",
            "gen_ai_server_request_duration_seconds",
            "From arrival to completion, failed requests included.",
        ),
        latency(
            "Queue time",
            "pillion_request_queue_time_seconds",
            "Time in the gateway's tenant queue, in the queue for KV memory, and in the decode worker's queue.",
        ),
        Panel(
            "Requests now",
            "short",
            (Query("sum by (state) (pillion_requests_now)", "{{state}}"),),
            "Current requests. waiting: in the gateways' tenant queues.",
            stacked=True,
        ),
        Panel(
            "Event loops",
            "s",
            (
                Query(
                    f"max by (component) (pillion_event_loop_longest_callback_seconds {EVERY_OWNER})", "{{component}}"
                ),
            ),
            "Longest callback in the last one or two minutes, which blocked the component's streams and heartbeats.",
        ),
    )
    traffic = (
        Panel(
            "Tokens",
            TOKENS_PER_S,
            (
                Query(f"sum({rate(sources, MODEL)})", "in"),
                Query(f"sum({rate('pillion_generated_tokens_total', MODEL)})", "out"),
            ),
            "Prompt tokens include cached ones and are counted at the end of a request; generated tokens live.",
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            (Query(rate_by("pillion_requests_total", "outcome", MODEL), "{{outcome}}"),),
            "stop, length and cancelled are normal; other outcomes are names of errors.",
            stacked=True,
        ),
        Panel(
            "Refusals by reason",
            "reqps",
            (Query(rate_by("pillion_rejected_requests_total", "reason"), "{{reason}}"),),
            "Requests rejected by gateways, by the limit or quota exceeded.",
            stacked=True,
        ),
        Panel(
            "Batches",
            "short",
            (
                Query(rate_by("pillion_batch_lines_total", "outcome"), "{{outcome}} per second"),
                Query("sum by (state) (pillion_batch_lines_now)", "{{state}}"),
            ),
            "Lines of batches: completed or retried per second, and running or queued.",
        ),
        Panel(
            "Records",
            "reqps",
            (Query(rate_by("pillion_recorded_requests_total", "reason"), "{{reason}}"),),
            "Requests whose bundles were written, by reason, or lost.",
            stacked=True,
        ),
        Panel(
            "Tokens by tenant",
            TOKENS_PER_S,
            (Query(rate_by("pillion_tenant_tokens_total", "tenant, kind"), "{{tenant}} {{kind}}"),),
            "Counted at the end of requests. Per gateway, tenants beyond 64 are aggregated.",
        ),
        Panel(
            "KV by tenant",
            "bytes",
            (Query(rate_by("pillion_tenant_kv_byte_seconds_total", "tenant, tier"), "{{tenant}} {{tier}}"),),
            "Mean KV memory of completed requests, by the tier it came from.",
        ),
    )
    workers = (
        Panel(
            "Workers",
            "short",
            (
                Query('count by (role) (pillion_build_info{role=~"prefill|decode"})', "{{role}}"),
                Query(
                    f"sum by (role) ({rate('pillion_step_duration_seconds_sum')} * on (job, instance)"
                    " group_left (role) pillion_build_info)",
                    "{{role}}, busy",
                ),
            ),
            "Workers, and the mean number of busy ones, by which prefill workers are scaled (docs/kubernetes.md).",
        ),
    )
    prompts = (
        Panel(
            "Prompt tokens by source",
            "percentunit",
            (Query(share, "{{source}}"),),
            "Cache hits: pool, fetched, restored and bucket. Computed: prefill and tail.",
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Split fraction",
            "percentunit",
            (Query(mean("pillion_request_split_fraction", MODEL), "mean"),),
            "Share of computed prompt tokens that were computed by prefill workers, not by decode workers.",
            maximum=1,
        ),
        Panel(
            "Replays",
            "ops",
            (Query(rate_by("pillion_replays_total", "gen_ai_request_model", MODEL), "{{gen_ai_request_model}}"),),
            "Answers continued on another worker after the loss of a component.",
        ),
    )
    lengths = {
        "prompt": "pillion_request_prompt_tokens",
        "answer": "pillion_request_answer_tokens",
        "longest answer": "pillion_request_longest_answer_tokens",
        "max_tokens": "pillion_request_max_tokens",
        "answers": "pillion_request_answers",
    }
    phases = ("prefill", "decode", "inference")
    requests = (
        Panel(
            "Phases of requests",
            "s",
            tuple(Query(mean(f"pillion_request_{phase}_time_seconds", MODEL), phase) for phase in phases),
            "Means. prefill: from the end of queueing to the first token; decode: from the first to the last token.",
        ),
        Panel(
            "Lengths of requests",
            "short",
            tuple(Query(mean(metric, MODEL), name) for name, metric in lengths.items()),
            "Mean tokens per prompt, answer, longest answer and max_tokens, and answers per request.",
        ),
        Panel(
            "Requests by model",
            "short",
            (
                Query(
                    f"sum by (gen_ai_request_model, state) (pillion_model_requests_now{{{MODEL}}})",
                    "{{gen_ai_request_model}} {{state}}",
                ),
            ),
            "Running and waiting requests, in the queues of gateways or decode workers.",
            stacked=True,
        ),
        Panel(
            "KV in use by model",
            "percentunit",
            (
                Query(
                    f"max by (gen_ai_request_model) (pillion_model_kv_usage_ratio{{{MODEL}}})",
                    "{{gen_ai_request_model}}",
                ),
            ),
            "Share of the pools of a model's workers that is unavailable to new prompts.",
            maximum=1,
        ),
        Panel(
            "Preemptions and drafts",
            "ops",
            (
                Query(f"sum({rate('pillion_request_preemptions_total', MODEL)})", "preemptions"),
                Query(rate_by("pillion_draft_tokens_total", "outcome", MODEL), "draft tokens, {{outcome}}"),
            ),
            "Counted at the end of requests.",
        ),
    )
    models = "label_values(pillion_inter_token_latency_seconds_count, gen_ai_request_model)"
    return Dashboard(
        "pillion-service",
        "Pillion: service",
        "Latency, traffic and errors as clients see them.",
        (Variable("model", "Model", models),),
        (
            ("Latency", latencies),
            ("Traffic", traffic),
            ("Requests", requests),
            ("Prompts and the split", prompts),
            ("Workers", workers),
        ),
    )


def _grammars() -> tuple[Panel, ...]:
    forced, late = map(rate_by_component, ("pillion_step_forced_tokens_total", "pillion_grammar_late_masks_total"))
    return (
        Panel(
            "Forced tokens",
            TOKENS_PER_S,
            (Query(forced, "{{component}}"),),
            "Tokens with only one choice under a grammar, which need no step of their own.",
        ),
        Panel(
            "Late masks",
            "ops",
            (Query(late, "{{component}}"),),
            "Answers that skipped a step because their grammar's mask was not ready. Other answers are not delayed.",
        ),
        latency_by_component(
            "Compiling grammars",
            "pillion_grammar_compile_duration_seconds",
            "Compilation time. Compiled grammars are cached; running streams do not wait for it.",
        ),
    )


def _adapters() -> tuple[Panel, ...]:
    return (
        Panel(
            "Load as planners see it",
            "short",
            (Query(f"sum by (component, figure) (pillion_load {OWNER})", "{{component}} {{figure}}"),),
            "Load figures of workers that other panels do not show.",
        ),
        Panel(
            "Adapters",
            "short",
            (
                Query(by_component("pillion_adapters"), "{{component}} ready"),
                Query(by_component("pillion_adapter_waits"), "{{component}} waiting sequences"),
            ),
            "Loaded adapters, and sequences waiting for an adapter to load or for a slot (--max-loras).",
        ),
        Panel(
            "Requests by adapter",
            "short",
            (
                Query("sum by (adapter) (pillion_adapter_requests_now)", "{{adapter}}"),
                Query("max(pillion_adapter_slots)", "--max-loras"),
            ),
            "Running requests by adapter. More adapters than --max-loras take turns on a worker.",
        ),
        Panel(
            "Adapter loads",
            "ops",
            (
                Query(
                    rate_by_component("pillion_adapter_loads_total", "component", "outcome"),
                    "{{component}} {{outcome}}",
                ),
                Query(rate_by_component("pillion_adapter_evictions_total"), "{{component}} evicted"),
                Query(rate_by_component("pillion_adapter_transfers_total"), "{{component}} from other machines"),
            ),
            "Many evictions: more adapters than --max-loras are in use.",
        ),
        latency_by_component(
            "Adapter loading",
            "pillion_adapter_load_duration_seconds",
            "Time to read and pack an adapter, in parallel to steps.",
        ),
    )


def _engine() -> Dashboard:
    uses = "pillion_step_budget_tokens_total"
    by_use, budget = f"{rate(uses)} {OWNER}", rate_by_component(uses, "use")
    worked, guessed = rate(uses, 'use!="idle"'), rate(uses, 'use="speculative"')
    share = f"{rate_by_component('pillion_step_accepted_tokens_total')} / sum by (component) ({guessed} {OWNER})"
    by_place = {
        kind: f"sum by (position) ({rate(f'pillion_step_{kind}_tokens_total')} {OWNER})"
        for kind in ("accepted", "wasted")
    }
    stage = ("component", "stage")
    waits = rate_by_component("pillion_stage_wait_seconds_total", *stage)
    steps = (
        latency_by_component(
            "Step duration",
            "pillion_step_duration_seconds",
            "Forward pass and sampling. On a decode worker, a step is the inter-token latency of all its sequences.",
        ),
        Panel(
            "Ranks",
            "short",
            (
                Query(by_component("pillion_ranks"), "{{component}} processes"),
                Query(rate_by_component("pillion_rank_wait_seconds_total"), "{{component}} share of time waiting"),
                Query(
                    f"{waits} / ({waits} + {rate_by_component('pillion_stage_work_seconds_total', *stage)})",
                    "{{component}} stage {{stage}}: bubbles",
                ),
            ),
            "Processes per worker (--tensor-parallel-size, --pipeline-parallel-size), rank 0's share of time waiting"
            " for the others, and bubbles: each stage's idle share during steps.",
        ),
        Panel(
            "Step budget by use",
            "percentunit",
            (Query(f"{budget} / ignoring (use) group_left () sum({by_use})", "{{use}}"),),
            "Decodes first, then prompt tails. Much idle despite a long queue: memory or slots are short.",
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Tokens by use",
            TOKENS_PER_S,
            (Query(f"sum by (use) ({worked} {OWNER})", "{{use}}"),),
            "Without the idle budget, which is large on idle prefill workers.",
            stacked=True,
        ),
        Panel(
            "Steps",
            "ops",
            (Query(rate_by_component("pillion_steps_total", "component", "outcome"), "{{component}} {{outcome}}"),),
            "failed: the backend raised an exception; the step's streams are replayed elsewhere.",
        ),
        Panel(
            "Accepted speculative tokens",
            "percentunit",
            (Query(share, "{{component}}"),),
            "Acceptance rate of draft tokens. If low, --speculative-config gains little.",
            maximum=1,
        ),
        Panel(
            "Accepted by position",
            "percentunit",
            (Query(f"{by_place['accepted']} / ({by_place['accepted']} + {by_place['wasted']})", "{{position}}"),),
            "Acceptance rate by position in the draft, from 0. Tokens after a rejected one count as rejected.",
            maximum=1,
        ),
        Panel(
            "Preemptions",
            "ops",
            (Query(rate_by_component("pillion_preemptions_total"), "{{component}}"),),
            "Sequences preempted for memory: the pool is too small for the admitted requests.",
        ),
    )
    states = f"sum by (component, state) (pillion_sequences {OWNER})"
    queues = (
        Panel(
            "Sequences",
            "short",
            (Query(states, "{{component}} {{state}}"),),
            "running includes decoding and prompts in progress. waiting: without a slot.",
        ),
        Panel(
            "Free slots",
            "short",
            (Query(by_component("pillion_free_sequences"), "{{component}}"),),
            "Free slots for running sequences. If 0 for long, add workers.",
        ),
        Panel(
            "Queued prompt tokens",
            "short",
            (Query(by_component("pillion_queued_tokens"), "{{component}}"),),
            "Prompt tokens yet to be computed. Used to autoscale prefill workers.",
        ),
    )
    return Dashboard(
        "pillion-engine",
        "Pillion: engine",
        "Steps and queues of prefill and decode workers; CPU and memory of all components except KV nodes.",
        (
            Variable(
                "component", "Component", 'label_values(pillion_build_info{role=~"gateway|prefill|decode"}, component)'
            ),
        ),
        (
            ("Steps", steps),
            ("Queues", queues),
            ("Grammars", _grammars()),
            ("Adapters", _adapters()),
            ("Processes", _processes()),
        ),
    )


def _processes() -> tuple[Panel, ...]:
    cpu = rate_by_component("process_cpu_seconds_total")
    return (
        Panel(
            "Memory",
            "bytes",
            (Query(by_component("process_resident_memory_bytes"), "{{component}}"),),
            "Resident memory. Shared pages of the KV pool count in each process that has touched them.",
        ),
        Panel("CPU", "short", (Query(cpu, "{{component}}"),), "Cores in use."),
        Panel(
            "Open files",
            "short",
            (Query(by_component("process_open_fds"), "{{component}}"),),
            "Open files, connections included.",
        ),
    )


def _kv() -> Dashboard:
    state_of = f"sum by (state) (pillion_kv_blocks {OWNER})"
    disk_bytes, short_bytes, object_bytes = (
        f"sum by (component) (pillion_kv_{of}_blocks * pillion_kv_block_size_bytes {OWNER})"
        for of in ("disk", "disk_short", "object")
    )
    pool = (
        Panel(
            "Blocks by state",
            "short",
            (Query(state_of, "{{state}}"),),
            "States add up to the pool. committed: the prefix cache, evicted when memory is needed.",
            stacked=True,
        ),
        Panel(
            "Usage",
            "percentunit",
            (Query(by_component("pillion_kv_usage_ratio"), "{{component}}"),),
            "Share of the pool that is unavailable to new prompts. At 1, requests wait for tickets.",
            maximum=1,
        ),
        Panel(
            "Held blocks",
            "short",
            (Query(f"sum by (component, state) (pillion_kv_held_blocks {OWNER})", "{{component}} {{state}}"),),
            "Pinned committed blocks, and reserved slots.",
        ),
        Panel(
            "Tickets",
            "short",
            (Query(f"sum by (component, state) (pillion_kv_tickets {OWNER})", "{{component}} {{state}}"),),
            "waiting: queued for memory.",
        ),
        latency_by_component(
            "Ticket wait", "pillion_kv_ticket_wait_seconds", "From the request of a ticket to its grant."
        ),
        Panel(
            "Committed and evicted",
            "suffix: blocks/s",
            (
                Query(rate_by_component("pillion_kv_committed_blocks_total"), "committed {{component}}"),
                Query(rate_by_component("pillion_kv_evicted_blocks_total"), "evicted {{component}}"),
            ),
            "Evictions as fast as commits, with a low hit rate: prefixes are evicted before reuse.",
        ),
        Panel(
            "Users' pins",
            "short",
            (
                Query(f"sum by (component) (pillion_kv_user_pinned_blocks {OWNER})", "blocks {{component}}"),
                Query(f"sum by (component) (pillion_kv_user_pins {OWNER})", "pins {{component}}"),
                Query(rate_by_component("pillion_kv_user_pin_hits_total"), "hits/s {{component}}"),
            ),
            "Users' prefix pins, their blocks, and prompts per second that hit a whole pinned prefix.",
        ),
    )
    moves = (
        Panel(
            "Moved blocks",
            "suffix: blocks/s",
            (Query(rate_by_component("pillion_kv_moved_blocks_total", "component", "way"), "{{component}} {{way}}"),),
            "fetched, served: between nodes; restored, spilled: between pool and lower tiers; bucket: from a bucket.",
        ),
        Panel(
            "Fetched bytes",
            "Bps",
            (Query(rate_by_component("pillion_kv_fetched_bytes_total", "source"), "{{source}}"),),
            "Bytes from other nodes, host memory or disk, or a bucket.",
            stacked=True,
        ),
        latency_by_component(
            "Fetch time", "pillion_kv_fetch_time_seconds", "Duration of fetches, including incomplete ones."
        ),
        Panel(
            "Short fetches",
            "ops",
            (Query(rate_by_component("pillion_kv_short_fetches_total"), "{{component}}"),),
            "Incomplete fetches; the rest is recomputed. Some are normal, since the index is a hint.",
        ),
        Panel(
            "Corrupt blocks",
            "suffix: blocks/s",
            (Query(rate_by_component("pillion_kv_corrupt_blocks_total"), "{{component}}"),),
            "Blocks dropped for a wrong checksum. Any indicates faulty memory, disk or network.",
        ),
        Panel(
            "On disk and in the bucket",
            "bytes",
            (
                Query(disk_bytes, "{{component}}: disk"),
                Query(short_bytes, "{{component}}: disk, no room"),
                Query(object_bytes, "{{component}}: bucket"),
            ),
            "The disk tier's blocks, its capacity used by other programs, and blocks known to be in the bucket.",
        ),
        Panel(
            "Kept slots",
            "suffix: blocks",
            (
                Query(by_component("pillion_kv_late_blocks"), "{{component}}: late reads"),
                Query(by_component("pillion_partial_blocks"), "{{component}}: partial blocks"),
            ),
            "Slots leased without a request: for reads that outlived their fetch, when a disk or node hangs, and for"
            " partial blocks that decode workers cache for next turns.",
        ),
        Panel(
            "Followers",
            "short",
            (
                Query(by_component("pillion_kv_followers"), "{{component}}"),
                Query(rate_by_component("pillion_kv_dropped_followers_total"), "{{component}} dropped/s"),
            ),
            "Routers that follow the pool's blocks. Slow ones are dropped and resume from a snapshot.",
        ),
    )
    health = (
        Panel(
            "Index available",
            "bool_yes_no",
            (Query("min(pillion_index_available)", "every gateway"),),
            "No: requests are served without cache hits.",
            maximum=1,
        ),
        Panel(
            "Registry writable",
            "bool_yes_no",
            (Query("min(pillion_registry_writable)", "every gateway"),),
            "No: known components keep serving; new ones are not discovered.",
            maximum=1,
        ),
        Panel(
            "Components down",
            "short",
            (Query("max by (component) (pillion_component_down)", "{{component}}"),),
            "Crash loops: the supervisor restarts them with growing delays.",
        ),
        Panel(
            "Components by version",
            "short",
            (
                Query(
                    "max by (version, protocol, used) (pillion_components)",
                    "{{version}}, protocol {{protocol}}, used: {{used}}",
                ),
            ),
            "More than one line: an upgrade is in progress. 0.2.0 does not announce its version.",
        ),
        Panel(
            "Fenced components",
            "short",
            (Query(by_component("pillion_kv_fenced_components"), "{{component}}"),),
            "Workers without heartbeats; their slots are quarantined until they drain or exit.",
        ),
    )
    return Dashboard(
        "pillion-kv",
        "Pillion: KV store",
        "Pool, transfers and health of KV nodes.",
        (Variable("component", "Node", 'label_values(pillion_build_info{role="kvnode"}, component)'),),
        (("Pool", pool), ("Moves", moves), ("Health", health), ("Processes", _processes())),
    )


DASHBOARDS = (_service(), _engine(), _kv())


def render() -> dict[str, str]:
    """Return the files' texts by name."""
    return {f"{each.uid}.json": json.dumps(build(each), indent=2) + "\n" for each in DASHBOARDS}


def main() -> None:
    """Write all files, and delete those of removed dashboards."""
    FOLDER.mkdir(exist_ok=True)
    files = render()
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
