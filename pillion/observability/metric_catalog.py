"""Catalog of all metrics, for code, dashboards and docs.

Names and labels are OpenTelemetry's; Prometheus sees underscores for dots, a unit's name, and ``_total`` after a
counter: ``pillion.kv.evicted_blocks`` becomes ``pillion_kv_evicted_blocks_total``. ``gen_ai.server.*`` follow the
semantic conventions for generative AI, including their bounds. Labels have few values, such as served models, states
and reasons; never a client's text.
"""

from __future__ import annotations

from pillion.observability.metrics import Metric

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"

# Histogram buckets, in seconds or tokens. TTFT, TPOT and DURATION use those of OpenTelemetry's GenAI conventions.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
ITL_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS_BOUNDS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)


def _tokens(name: str, text: str) -> Metric:
    return Metric(name, "histogram", "{token}", text, (MODEL,), TOKENS_BOUNDS)


def _counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, text, labels)


def _gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, text, labels)


def _seconds(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", "s", text, labels, bounds)


# Every component.

BUILD = _gauge("pillion.build_info", "", "1, labelled with what is running.", "version", "role", "component")
LOOP_LONGEST = _gauge(
    "pillion.event_loop.longest_callback",
    "s",
    "Longest block of the event loop in the last two minutes.",
)

# Gateway: requests.

TTFT = _seconds(
    "gen_ai.server.time_to_first_token", "From a request's arrival to its first token.", TTFT_BOUNDS, OPERATION, MODEL
)
TPOT = _seconds(
    "gen_ai.server.time_per_output_token",
    "Of an answer: time per token after the first.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    OPERATION,
    MODEL,
)
DURATION = _seconds(
    "gen_ai.server.request.duration",
    "From arrival to end; error.type is empty on success.",
    DURATION_BOUNDS,
    OPERATION,
    MODEL,
    "error.type",
)
ITL = _seconds("pillion.inter_token_latency", "Between two tokens of a stream.", ITL_BOUNDS, MODEL)
QUEUE_TIME = _seconds(
    "pillion.request.queue_time",
    "Wait in the tenants' queue, for KV memory, and in the decode worker's queue.",
    DURATION_BOUNDS,
    MODEL,
)
PREFILL_TIME = _seconds(
    "pillion.request.prefill_time",
    "From the end of waiting to the first token.",
    DURATION_BOUNDS,
    MODEL,
)
DECODE_TIME = _seconds("pillion.request.decode_time", "From the first token to the last.", DURATION_BOUNDS, MODEL)
INFERENCE_TIME = _seconds("pillion.request.inference_time", "Prefill and decode together.", DURATION_BOUNDS, MODEL)
REQUEST_PROMPT_TOKENS = _tokens("pillion.request.prompt_tokens", "Tokens of each request's prompt.")
ANSWER_TOKENS = _tokens("pillion.request.answer_tokens", "Tokens of each answer.")
LONGEST_ANSWER_TOKENS = _tokens("pillion.request.longest_answer_tokens", "Tokens of each request's longest answer.")
MAX_TOKENS = _tokens("pillion.request.max_tokens", "Max tokens of each answer.")
ANSWERS = Metric(
    "pillion.request.answers",
    "histogram",
    "{answer}",
    "Answers to each request.",
    (MODEL,),
    (1.0, 2.0, 5.0, 10.0, 20.0),
)
SPLIT = Metric(
    "pillion.request.split_fraction",
    "histogram",
    "1",
    "Share of a prompt's uncached tokens that prefill workers computed.",
    (MODEL,),
    (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
PROMPT_TOKENS = _counter(
    "pillion.prompt_tokens",
    "{token}",
    "Prompt tokens by where their KV came from: pool, fetched (other nodes), restored (host memory and disk), bucket, "
    "prefill, tail.",
    MODEL,
    "source",
)
GENERATED_TOKENS = _counter("pillion.generated_tokens", "{token}", "Generated tokens.", MODEL)
REQUESTS = _counter(
    "pillion.requests", "{request}", "Ended requests: stop, length, cancelled, or the error's code.", MODEL, "outcome"
)
REJECTED = _counter("pillion.rejected_requests", "{request}", "Requests rejected at the edge.", "reason")
TENANT_TOKENS = _counter(
    "pillion.tenant.tokens",
    "{token}",
    "Tokens of a tenant's ended requests: computed, cached, generated.",
    "tenant",
    "kind",
)
TENANT_KV = _counter(
    "pillion.tenant.kv_byte_seconds",
    "",
    "KV that a tenant's ended requests held in pools, in bytes times seconds, by where it came from: computed, pool, "
    "fetched, restored, bucket.",
    "tenant",
    "tier",
)
REPLAYS = _counter("pillion.replays", "{attempt}", "Further attempts after a component was lost.", MODEL)
REQUEST_PREEMPTIONS = _counter(
    "pillion.request.preemptions", "{preemption}", "Preemptions of the streams of ended requests.", MODEL
)
DRAFT_TOKENS = _counter(
    "pillion.draft_tokens", "{token}", "Draft tokens of ended requests: accepted, rejected.", MODEL, "outcome"
)
MODEL_REQUESTS = _gauge(
    "pillion.model.requests_now",
    "{request}",
    "Requests of this gateway: running, and waiting here or in decode workers' queues.",
    MODEL,
    "state",
)
MODEL_KV_USAGE = _gauge(
    "pillion.model.kv_usage",
    "1",
    "Share of the model's pools that is leased, quarantined or pinned.",
    MODEL,
)
REQUESTS_NOW = _gauge("pillion.requests_now", "{request}", "Requests: running, waiting.", "state")
INDEX_UP = _gauge("pillion.index_available", "", "1 while the index answers.")
REGISTRY_WRITABLE = _gauge("pillion.registry_writable", "", "1 while Redis accepts the gateway's heartbeats.")
COMPONENTS = _gauge(
    "pillion.components",
    "{component}",
    "Known components; used is no if the protocol is incompatible.",
    "version",
    "protocol",
    "used",
)
COMPONENTS_DOWN = _gauge(
    "pillion.component.down",
    "",
    "1 while a flapping component waits for its restart.",
    "component",
)
BATCH_LINES = _counter(
    "pillion.batch.lines", "{line}", "Lines of batches: completed, failed, or retried for now.", "outcome"
)
BATCH_LINES_NOW = _gauge(
    "pillion.batch.lines_now", "{line}", "Lines of this gateway's batches: running, queued.", "state"
)
RECORDED = _counter(
    "pillion.recorded_requests",
    "{request}",
    "Requests whose bundle was written (--record-path): failed, slow, asked or share; and those that have none: lost"
    " (too many at once), unwritten (the disk, Redis), over (too many of a tenant).",
    "reason",
)

ADAPTER_REQUESTS = _gauge("pillion.adapter.requests_now", "{request}", "Running requests by adapter.", "adapter")
ADAPTER_SLOTS = _gauge("pillion.adapter.slots", "{adapter}", "Adapter slots per worker (--max-loras).")

# Workers: steps.

STEP_DURATION = _seconds("pillion.step.duration", "Of a step: forward pass and sampling.", STEP_BOUNDS)
STEP_BUDGET = _counter(
    "pillion.step.budget_tokens",
    "{token}",
    "What filled the steps' token budgets: decode, prompt tail, prefill, speculative, forced (by grammars), and idle"
    " for what stayed free.",
    "use",
)
RANKS = _gauge("pillion.ranks", "{process}", "Processes of a tensor-parallel worker.")
RANK_WAIT = _counter("pillion.rank.wait", "s", "Time that a worker's first rank waited for the others.")
STAGE_WORK = _counter("pillion.stage.work", "s", "Time that a stage computed.", "stage")
STAGE_WAIT = _counter("pillion.stage.wait", "s", "Time that a stage was idle during steps: bubbles.", "stage")
STEPS = _counter("pillion.steps", "{step}", "Steps; failed ones had an error of the backend.", "outcome")
ACCEPTED = _counter(
    "pillion.step.accepted_tokens",
    "{token}",
    "Accepted draft tokens by position in the draft, from 0.",
    "position",
)
WASTED = _counter(
    "pillion.step.wasted_tokens",
    "{token}",
    "Rejected draft tokens by position in the draft, from 0.",
    "position",
)
FORCED = _counter("pillion.step.forced_tokens", "{token}", "Tokens that grammars determined.")
LATE_MASKS = _counter("pillion.grammar.late_masks", "{mask}", "Grammar masks that were not ready in time.")
GRAMMAR_COMPILE = _seconds("pillion.grammar.compile.duration", "Compilation of a grammar by a worker.", STEP_BOUNDS)
PREEMPTIONS = _counter("pillion.preemptions", "{preemption}", "Preemptions of streams.")
ADAPTER_LOADS = _counter("pillion.adapter.loads", "{adapter}", "Adapters that a worker read and packed.", "outcome")
ADAPTER_LOAD = _seconds("pillion.adapter.load.duration", "Reading and packing an adapter.", STEP_BOUNDS)
ADAPTER_TRANSFERS = _counter("pillion.adapter.transfers", "{adapter}", "Adapters fetched from another machine.")
ADAPTER_EVICTIONS = _counter("pillion.adapter.evictions", "{adapter}", "Evicted idle adapters.")
ADAPTERS = _gauge("pillion.adapters", "{adapter}", "Adapters loaded in a worker.")
PARTIAL_BLOCKS = _gauge(
    "pillion.partial_blocks",
    "{block}",
    "Slots leased for partial blocks of ended answers.",
)
ADAPTER_WAITS = _gauge("pillion.adapter.waits", "{sequence}", "Sequences waiting for their adapter.")
SEQUENCES = _gauge("pillion.sequences", "{sequence}", "On a worker: running, of them decoding, and waiting.", "state")
FREE_SEQUENCES = _gauge("pillion.free_sequences", "{sequence}", "Free places for sequences.")
LOAD = _gauge("pillion.load", "", "Further figures of a worker's load.", "figure")
QUEUED_TOKENS = _gauge("pillion.queued_tokens", "{token}", "Prompt tokens yet to compute.")

# KV nodes.

KV_BLOCKS = _gauge("pillion.kv.blocks", "{block}", "Slots: free, leased, committed, quarantined.", "state")
KV_HELD = _gauge("pillion.kv.held_blocks", "{block}", "Committed blocks that are pinned; reserved slots.", "state")
KV_USAGE = _gauge(
    "pillion.kv.usage",
    "1",
    "Share of the pool that is leased, quarantined, pinned or reserved.",
)
KV_USER_PINS = _gauge("pillion.kv.user_pins", "{pin}", "Prefixes pinned by users.")
KV_USER_PINNED = _gauge("pillion.kv.user_pinned_blocks", "{block}", "Blocks of user-pinned prefixes, present or not.")
KV_USER_PIN_HITS = _counter(
    "pillion.kv.user_pin_hits",
    "{prompt}",
    "Prompts that found a whole pinned prefix in the pool.",
)
KV_BLOCK_BYTES = _gauge("pillion.kv.block_size", "By", "Bytes of a block.")
KV_DISK_BLOCKS = _gauge("pillion.kv.disk_blocks", "{block}", "Blocks in the disk tier.")
KV_DISK_SHORT = _gauge(
    "pillion.kv.disk_short_blocks", "{block}", "Blocks within --disk-bytes that the full disk lacks."
)
KV_OBJECT_BLOCKS = _gauge("pillion.kv.object_blocks", "{block}", "Blocks known to be in the bucket.")
KV_PAUSED = _gauge("pillion.kv.paused_tiers", "{tier}", "Tiers paused for late reads.")
KV_LATE = _gauge("pillion.kv.late_blocks", "{block}", "Slots kept by reads that outlived their fetch.")
KV_TICKETS = _gauge("pillion.kv.tickets", "{ticket}", "Tickets: held, waiting for memory.", "state")
KV_FOLLOWERS = _gauge("pillion.kv.followers", "{follower}", "External followers of the pool's blocks.")
KV_FENCED = _gauge("pillion.kv.fenced_components", "{part}", "Currently fenced workers.")
KV_COMMITTED = _counter("pillion.kv.committed_blocks", "{block}", "Sealed blocks.")
KV_EVICTED = _counter("pillion.kv.evicted_blocks", "{block}", "Blocks that left the pool.")
KV_MOVED = _counter(
    "pillion.kv.moved_blocks",
    "{block}",
    "Blocks fetched from nodes, served to nodes, restored, of a bucket, spilled, recovered.",
    "way",
)
KV_CORRUPT = _counter("pillion.kv.corrupt_blocks", "{block}", "Blocks with a wrong checksum.")
KV_DROPPED_FOLLOWERS = _counter("pillion.kv.dropped_followers", "{follower}", "Followers dropped for being slow.")
KV_SHORT_FETCHES = _counter("pillion.kv.short_fetches", "{fetch}", "Fetches that brought less than requested.")
KV_FETCH_BYTES = _counter("pillion.kv.fetched", "By", "Bytes that came from nodes, a lower tier or a bucket.", "source")
KV_FETCH_TIME = _seconds("pillion.kv.fetch_time", "Duration of a fetch.", TTFT_BOUNDS)
KV_TICKET_WAIT = _seconds("pillion.kv.ticket_wait", "From the request for a ticket to its grant.", TTFT_BOUNDS)

CATALOG = [value for value in globals().values() if isinstance(value, Metric)]
