"""Writes dashboards/*.json, which Grafana reads: ``python -m deploy.grafana.make``, or ``make dashboards``.

    the dashboards below --build--> Grafana's JSON --render--> text --main--> a file each

The same input gives the same bytes. A test compares the files, and checks every query against the metrics that exist.
Change dashboards in this file: Grafana is configured not to save changes.
"""

from __future__ import annotations

import json
import pathlib

from deploy.grafana.model import Dashboard, Panel, Query, Variable, build

FOLDER = pathlib.Path(__file__).resolve().parent / "dashboards"
MODEL = 'gen_ai_request_model=~"$model"'
TOKENS_PER_S = "suffix: tokens/s"
# A series of a worker or node gets its component's name from that component's pillion_build_info.
OWNER = '* on (job, instance) group_left (component) pillion_build_info{component=~"$component"}'
EVERY_OWNER = "* on (job, instance) group_left (component) pillion_build_info"
_QUANTILES = ((0.5, "p50"), (0.99, "p99"))


# Queries of several panels.


def rate(metric: str, where: str = "") -> str:
    """Returns a counter's rate per second."""
    chosen = f"{{{where}}}" if where else ""
    return f"rate({metric}{chosen}[$__rate_interval])"


def rate_by(metric: str, by: str, where: str = "") -> str:
    """Returns a counter's rate per second, summed over all labels but ``by``."""
    return f"sum by ({by}) ({rate(metric, where)})"


def latency(title: str, metric: str, text: str, where: str = MODEL) -> Panel:
    """Returns a panel of p50 and p99 of a histogram in seconds."""
    inside = rate_by(f"{metric}_bucket", "le", where)
    queries = tuple(Query(f"histogram_quantile({quantile}, {inside})", name) for quantile, name in _QUANTILES)
    return Panel(title, "s", queries, text)


def latency_by_component(title: str, metric: str, text: str) -> Panel:
    """Returns a panel of p50 and p99 of a histogram in seconds, for each component."""
    inside = f"sum by (le, component) ({rate(f'{metric}_bucket')} {OWNER})"
    queries = tuple(
        Query(f"histogram_quantile({quantile}, {inside})", f"{name} {{{{component}}}}") for quantile, name in _QUANTILES
    )
    return Panel(title, "s", queries, text)


def by_component(metric: str) -> str:
    """Returns a gauge of each component."""
    return f"sum by (component) ({metric} {OWNER})"


def rate_by_component(metric: str, *labels: str) -> str:
    """Returns a counter's rate by component, or by other given labels."""
    return f"sum by ({', '.join(labels or ('component',))}) ({rate(metric)} {OWNER})"


def mean(metric: str, where: str) -> str:
    """Returns the mean of a histogram."""
    return f"sum({rate(f'{metric}_sum', where)}) / sum({rate(f'{metric}_count', where)})"


def _service() -> Dashboard:
    sources = "pillion_prompt_tokens_total"
    share = f"{rate_by(sources, 'source', MODEL)} / ignoring (source) group_left () sum({rate(sources, MODEL)})"
    latencies = (
        latency(
            "Time to first token",
            "gen_ai_server_time_to_first_token_seconds",
            "Queue time, computing the prompt, and one step. It rises first when prefill workers are too few.",
        ),
        latency(
            "Inter-token latency",
            "pillion_inter_token_latency_seconds",
            "The pauses that a reader of a stream notices. It rises with decodes per worker and with the token budget.",
        ),
        latency(
            "Time per output token",
            "gen_ai_server_time_per_output_token_seconds",
            "An answer's mean after its first token; a pause in a long answer hardly changes it.",
        ),
        latency(
            "Whole request", "gen_ai_server_request_duration_seconds", "From arrival to end, failed requests included."
        ),
        latency(
            "Queue time",
            "pillion_request_queue_time_seconds",
            "Time in the gateway's tenant queue, waiting for KV memory, and in the decode worker's queue.",
        ),
        Panel(
            "Requests now",
            "short",
            (Query("sum by (state) (pillion_requests_now)", "{{state}}"),),
            "Waiting requests are in the gateways' tenant queues.",
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
            "The longest callback of the last minute or two: so long a component's streams and heartbeats stood still.",
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
            "Prompt tokens, cached ones included, are counted at a request's end; generated tokens as they come.",
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            (Query(rate_by("pillion_requests_total", "outcome", MODEL), "{{outcome}}"),),
            "stop, length and cancelled are normal; every other outcome is an error's name.",
            stacked=True,
        ),
        Panel(
            "Refusals by reason",
            "reqps",
            (Query(rate_by("pillion_rejected_requests_total", "reason"), "{{reason}}"),),
            "Requests that the gateway refused, by the bound or quota that they met.",
            stacked=True,
        ),
        Panel(
            "Batches",
            "short",
            (
                Query(rate_by("pillion_batch_lines_total", "outcome"), "{{outcome}} per second"),
                Query("sum by (state) (pillion_batch_lines_now)", "{{state}}"),
            ),
            "Lines of batches: how many end or are sent again, and how many run or are queued.",
        ),
        Panel(
            "Records",
            "reqps",
            (Query(rate_by("pillion_recorded_requests_total", "reason"), "{{reason}}"),),
            "Requests whose bundles were written, by why, and those whose bundles were lost.",
            stacked=True,
        ),
        Panel(
            "Tokens by tenant",
            TOKENS_PER_S,
            (Query(rate_by("pillion_tenant_tokens_total", "tenant, kind"), "{{tenant}} {{kind}}"),),
            "Counted at the ends of requests. Beyond 64 tenants of a gateway the others are together.",
        ),
        Panel(
            "KV by tenant",
            "bytes",
            (Query(rate_by("pillion_tenant_kv_byte_seconds_total", "tenant, tier"), "{{tenant}} {{tier}}"),),
            "The KV that ended requests held in pools on the average, by where it came from.",
        ),
    )
    workers = (
        Panel(
            "Workers",
            "short",
            (
                Query('count by (role) (pillion_build_info{role=~"prefill|decode"})', "{{role}}, there"),
                Query(
                    f"sum by (role) ({rate('pillion_step_duration_seconds_sum')} * on (job, instance)"
                    " group_left (role) pillion_build_info)",
                    "{{role}}, whose steps run",
                ),
            ),
            "How many workers there are, and how many of them compute on the average; prefill workers are scaled by it"
            " (docs/kubernetes.md).",
        ),
    )
    prompts = (
        Panel(
            "Prompt tokens by source",
            "percentunit",
            (Query(share, "{{source}}"),),
            "pool, fetched, restored and bucket are cache hits; prefill and tail tokens were computed.",
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Split fraction",
            "percentunit",
            (Query(mean("pillion_request_split_fraction", MODEL), "mean"),),
            "The share of computed prompt tokens that prefill workers computed; decode workers computed the rest.",
            maximum=1,
        ),
        Panel(
            "Replays",
            "ops",
            (Query(rate_by("pillion_replays_total", "gen_ai_request_model", MODEL), "{{gen_ai_request_model}}"),),
            "Answers that continued on another worker after a component was lost.",
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
            "Means: prefill is from the end of waiting to the first token, decode from there to the last one.",
        ),
        Panel(
            "Lengths of requests",
            "short",
            tuple(Query(mean(metric, MODEL), name) for name, metric in lengths.items()),
            "Mean tokens of prompts, answers, longest answers and limits, and answers per request.",
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
            "Of those that wait, some are in the gateways' lines and some in decode workers'.",
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
            "The share of the pools of a model's workers that a new prompt cannot have.",
            maximum=1,
        ),
        Panel(
            "Preemptions and drafts",
            "ops",
            (
                Query(f"sum({rate('pillion_request_preemptions_total', MODEL)})", "preemptions"),
                Query(rate_by("pillion_draft_tokens_total", "outcome", MODEL), "draft tokens, {{outcome}}"),
            ),
            "Counted at the ends of requests.",
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
            "Tokens of answers that a grammar left no choice of. They cost no step of their own.",
        ),
        Panel(
            "Late masks",
            "ops",
            (Query(late, "{{component}}"),),
            "Answers that sat out a step because their grammar's mask was not there. Other answers went on.",
        ),
        latency_by_component(
            "Compiling grammars",
            "pillion_grammar_compile_duration_seconds",
            "A worker compiles a grammar once and keeps it. Streams that run do not wait for it.",
        ),
    )


def _adapters() -> tuple[Panel, ...]:
    return (
        Panel(
            "Load as planners see it",
            "short",
            (Query(f"sum by (component, figure) (pillion_load {OWNER})", "{{component}} {{figure}}"),),
            "Figures of the workers' load that no other panel has.",
        ),
        Panel(
            "Adapters",
            "short",
            (
                Query(by_component("pillion_adapters"), "{{component}} ready"),
                Query(by_component("pillion_adapter_waits"), "{{component}} waiting sequences"),
            ),
            "Sequences wait while their adapter loads, or for a slot that others hold (--max-loras).",
        ),
        Panel(
            "Requests by adapter",
            "short",
            (
                Query("sum by (adapter) (pillion_adapter_requests_now)", "{{adapter}}"),
                Query("max(pillion_adapter_slots)", "--max-loras"),
            ),
            "Requests that run, by the name of their adapter. More adapters than --max-loras take turns on a worker.",
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
            "Many evictions: more adapters are in use than --max-loras, and take turns.",
        ),
        latency_by_component(
            "Adapter loading", "pillion_adapter_load_duration_seconds", "Reading and packing, beside the steps."
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
            "Forward pass and sampling. A decode worker's step is the inter-token latency of all its sequences.",
        ),
        Panel(
            "Ranks",
            "short",
            (
                Query(by_component("pillion_ranks"), "{{component}} processes"),
                Query(rate_by_component("pillion_rank_wait_seconds_total"), "{{component}} share of time that waits"),
                Query(
                    f"{waits} / ({waits} + {rate_by_component('pillion_stage_work_seconds_total', *stage)})",
                    "{{component}} stage {{stage}}: idle share while steps are under way",
                ),
            ),
            "Processes of a worker (--tensor-parallel-size, --pipeline-parallel-size), how long its first one waits for"
            " the others' answers, and the bubbles of each stage.",
        ),
        Panel(
            "Step budget by use",
            "percentunit",
            (Query(f"{budget} / ignoring (use) group_left () sum({by_use})", "{{use}}"),),
            "Decodes go first, prompt tails fill the rest. Much idle beside a long queue: memory or slots are short.",
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Tokens by use",
            TOKENS_PER_S,
            (Query(f"sum by (use) ({worked} {OWNER})", "{{use}}"),),
            "Tokens by use without the idle budget, which is large where a prefill worker has little to do.",
            stacked=True,
        ),
        Panel(
            "Steps",
            "ops",
            (Query(rate_by_component("pillion_steps_total", "component", "outcome"), "{{component}} {{outcome}}"),),
            "failed: the backend raised, and the step's streams are replayed elsewhere.",
        ),
        Panel(
            "Accepted speculative tokens",
            "percentunit",
            (Query(share, "{{component}}"),),
            "Share of speculative tokens. Where few are right, --speculative-config gains little.",
            maximum=1,
        ),
        Panel(
            "Accepted by position",
            "percentunit",
            (Query(f"{by_place['accepted']} / ({by_place['accepted']} + {by_place['wasted']})", "{{position}}"),),
            "Share of the guesses at each place, from 0, that were right, those after a wrong one counted as wrong.",
            maximum=1,
        ),
        Panel(
            "Preemptions",
            "ops",
            (Query(rate_by_component("pillion_preemptions_total"), "{{component}}"),),
            "Streams that gave up their memory for a while: the pool is too small for the admitted requests.",
        ),
    )
    states = f"sum by (component, state) (pillion_sequences {OWNER})"
    queues = (
        Panel(
            "Sequences",
            "short",
            (Query(states, "{{component}} {{state}}"),),
            "running includes decoding; the difference is prompts in progress. waiting sequences have no slot.",
        ),
        Panel(
            "Free slots",
            "short",
            (Query(by_component("pillion_free_sequences"), "{{component}}"),),
            "Slots for running sequences. A long time at 0: add workers.",
        ),
        Panel(
            "Queued prompt tokens",
            "short",
            (Query(by_component("pillion_queued_tokens"), "{{component}}"),),
            "Prompt tokens that are still to be computed. Autoscalers of prefill workers use them.",
        ),
    )
    return Dashboard(
        "pillion-engine",
        "Pillion: engine",
        "Steps and queues of prefill and decode workers, and processor and memory of all components but KV nodes.",
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
            "Resident memory. The KV pool's pages are shared and count in each process that has touched them.",
        ),
        Panel("Processor", "short", (Query(cpu, "{{component}}"),), "Cores in use."),
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
            "The states add up to the pool. committed blocks are the prefix cache, evicted when memory is needed.",
            stacked=True,
        ),
        Panel(
            "Usage",
            "percentunit",
            (Query(by_component("pillion_kv_usage_ratio"), "{{component}}"),),
            "The share of the pool that a new prompt cannot get. At 1 requests wait for tickets.",
            maximum=1,
        ),
        Panel(
            "Held blocks",
            "short",
            (Query(f"sum by (component, state) (pillion_kv_held_blocks {OWNER})", "{{component}} {{state}}"),),
            "Committed blocks that are pinned, and slots that are reserved.",
        ),
        Panel(
            "Tickets",
            "short",
            (Query(f"sum by (component, state) (pillion_kv_tickets {OWNER})", "{{component}} {{state}}"),),
            "waiting tickets wait for memory.",
        ),
        latency_by_component("Ticket wait", "pillion_kv_ticket_wait_seconds", "From a ticket's request to its grant."),
        Panel(
            "Committed and evicted",
            "suffix: blocks/s",
            (
                Query(rate_by_component("pillion_kv_committed_blocks_total"), "committed {{component}}"),
                Query(rate_by_component("pillion_kv_evicted_blocks_total"), "evicted {{component}}"),
            ),
            "Evictions as fast as commits with few hits: prefixes are evicted before they are used again.",
        ),
        Panel(
            "Users' pins",
            "short",
            (
                Query(f"sum by (component) (pillion_kv_user_pinned_blocks {OWNER})", "blocks {{component}}"),
                Query(f"sum by (component) (pillion_kv_user_pins {OWNER})", "pins {{component}}"),
                Query(rate_by_component("pillion_kv_user_pin_hits_total"), "hits/s {{component}}"),
            ),
            "Blocks of the prefixes that users have pinned, the pins, and prompts a second that found all of one.",
        ),
    )
    moves = (
        Panel(
            "Moved blocks",
            "suffix: blocks/s",
            (Query(rate_by_component("pillion_kv_moved_blocks_total", "component", "way"), "{{component}} {{way}}"),),
            "fetched and served: between nodes; restored and spilled: between pool and lower tiers; bucket: from one.",
        ),
        Panel(
            "Fetched bytes",
            "Bps",
            (Query(rate_by_component("pillion_kv_fetched_bytes_total", "source"), "{{source}}"),),
            "Bytes from other nodes, from host memory or disk, and from a bucket.",
            stacked=True,
        ),
        latency_by_component(
            "Fetch time", "pillion_kv_fetch_time_seconds", "Duration of all fetches, complete or not."
        ),
        Panel(
            "Short fetches",
            "ops",
            (Query(rate_by_component("pillion_kv_short_fetches_total"), "{{component}}"),),
            "Fetches of less than requested; the rest is computed again. Some are normal, since the index is a hint.",
        ),
        Panel(
            "Corrupt blocks",
            "suffix: blocks/s",
            (Query(rate_by_component("pillion_kv_corrupt_blocks_total"), "{{component}}"),),
            "Blocks with a wrong checksum, which were dropped. Any means that memory, disk or network is faulty.",
        ),
        Panel(
            "On disk and in the bucket",
            "bytes",
            (
                Query(disk_bytes, "{{component}}: disk"),
                Query(short_bytes, "{{component}}: disk, no room"),
                Query(object_bytes, "{{component}}: bucket"),
            ),
            "The disk tier's blocks, what others have taken of its room, and blocks known to be in the bucket.",
        ),
        Panel(
            "Kept slots",
            "suffix: blocks",
            (
                Query(by_component("pillion_kv_late_blocks"), "{{component}}: late reads"),
                Query(by_component("pillion_partial_blocks"), "{{component}}: partial blocks"),
            ),
            "Slots that stay leased without a request: of reads that outlived their fetch, as a disk or a node does"
            " not answer, and of the partial blocks that decode workers keep for next turns.",
        ),
        Panel(
            "Followers",
            "short",
            (
                Query(by_component("pillion_kv_followers"), "{{component}}"),
                Query(rate_by_component("pillion_kv_dropped_followers_total"), "{{component}} dropped/s"),
            ),
            "Routers that follow the pool's blocks. A dropped one was too slow; it follows again with a snapshot.",
        ),
    )
    health = (
        Panel(
            "Index answers",
            "bool_yes_no",
            (Query("min(pillion_index_available)", "every gateway"),),
            "No: no prefix is found, every prompt is computed, and requests are served.",
            maximum=1,
        ),
        Panel(
            "Registry takes heartbeats",
            "bool_yes_no",
            (Query("min(pillion_registry_writable)", "every gateway"),),
            "No: components that are known serve on, and new ones are not found.",
            maximum=1,
        ),
        Panel(
            "Components that are down",
            "short",
            (Query("max by (component) (pillion_component_down)", "{{component}}"),),
            "They die again and again, and their supervisor starts them ever more rarely.",
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
            "More than one line: an upgrade is under way. 0.2.0 does not say its version.",
        ),
        Panel(
            "Fenced components",
            "short",
            (Query(by_component("pillion_kv_fenced_components"), "{{component}}"),),
            "Workers without heartbeats; their slots are in quarantine until they drain or end.",
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
    """Returns each file's text by its name."""
    return {f"{each.uid}.json": json.dumps(build(each), indent=2) + "\n" for each in DASHBOARDS}


def main() -> None:
    """Writes all files, and delete those of former dashboards."""
    FOLDER.mkdir(exist_ok=True)
    files = render()
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
