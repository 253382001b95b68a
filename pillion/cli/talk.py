"""Client commands generate and status, over the SDK. ``reach`` has the arguments of :class:`pillion.Client`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from pillion.cli.console import table_console
from pillion.client.client import Client
from pillion.types import ClusterStatus, ComponentStatus, Delta, ModelInfo, StructuredOutputs, TokenLogprob

MAX_NAMED = 4


def run_generate(prompt: str, reach: dict[str, Any], sampling: dict[str, Any], schema: str = "") -> None:
    """Stream a prompt's continuation to standard output, several answers one after the other. With a JSON ``schema``,
    answers fit it. Raises PillionError."""
    structured = StructuredOutputs(json=schema) if schema else None
    with Client(**reach, connect_timeout_s=0.0) as client:
        deltas = client.generate(prompt, structured_outputs=structured, **explicit_options(sampling))
        if (sampling.get("n") or 1) > 1:
            show_each(deltas)
        else:
            show(deltas)


def explicit_options(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling options that the user has set; the gateway has defaults for the others."""
    return {name: value for name, value in sampling.items() if value not in (None, (), "", {})}


def show(deltas: Iterable[Delta], texts: list[str] | None = None) -> str:
    """Print an answer's text as it arrives, then its log probabilities if any; return the text. Reasoning goes to
    standard error, so that the output is the answer alone.

    Args:
        texts: receives each piece of the text just before it is printed, for the caller to use after Ctrl-C.
    """
    texts = [] if texts is None else texts
    logprobs: list[TokenLogprob] = []
    in_reasoning = False
    for delta in deltas:
        if delta.reasoning or (in_reasoning and delta.text):
            sys.stderr.write(delta.reasoning or "\n\n")
            sys.stderr.flush()
            in_reasoning = bool(delta.reasoning) and not delta.text
        texts.append(delta.text)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        logprobs += delta.logprobs
    sys.stdout.write("\n" + logprob_lines(logprobs))
    sys.stdout.flush()
    return "".join(texts)


def show_each(deltas: Iterable[Delta]) -> None:
    """Print each answer under a heading, in order, when all are complete."""
    answers: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        answers[delta.index].append(delta)
    for index, answer in sorted(answers.items()):
        sys.stdout.write(f"--- answer {index + 1} ---\n")
        show(answer)


def logprob_lines(logprobs: Iterable[TokenLogprob]) -> str:
    """Return a line per token: its id and log probability, then the alternatives, most likely first."""
    lines = []
    for token in logprobs:
        others = "  ".join(f"{i} {p:.3f}" for i, p in zip(token.top_ids, token.top_logprobs, strict=False))
        lines.append(f"{token.token_id:>8} {token.logprob:>9.3f}{'   | ' if others else ''}{others}\n")
    return "".join(("   token   logprob\n", *lines)) if lines else ""


def run_status(reach: dict[str, Any], as_json: bool) -> None:
    """Print the cluster's state. Raises PillionError."""
    with Client(**reach) as client:
        status, models = client.status(), client.models()
    if as_json:
        print(json.dumps({**asdict(status), "models": [asdict(model) for model in models]}, indent=2))
        return
    console = table_console(120)
    console.print(status_table(status))
    for line in component_lines(status):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print()
    for model in models:
        console.print(model_line(model, status))
    if any(tenant.tenant for tenant in status.tenants):
        console.print(tenant_table(status))
    console.print(summary(status))
    if versions := version_line(status):
        console.print(versions, soft_wrap=True, markup=False, highlight=False)


def status_table(status: ClusterStatus) -> Table:
    """Return a table of the components' loads that fits into 80 columns."""
    table = Table(title=f"Pillion {status.version}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("component", overflow="fold")
    table.add_column("role", no_wrap=True)
    for name in ("running", "waiting", "waiting\ntokens", "heartbeat"):
        table.add_column(name, justify="right", no_wrap=True)
    for component in _in_order(status):
        load = [component.running_requests, component.waiting_requests, component.waiting_tokens]
        cells = ["", "", ""] if component.role == "kvnode" else map(str, load)
        table.add_row(component.component_id, component.role, *cells, f"{component.heartbeat_age_ms} ms ago")
    return table


def component_lines(status: ClusterStatus) -> Iterator[str]:
    """Yield a line per component with its model, kernels, node, and trouble or pool usage, if it has any of these."""
    sizes = _block_sizes(status)
    for component in _in_order(status):
        node = component.node_id if component.node_id != component.component_id else ""
        pool = pool_use(component, sizes.get(component.node_id or component.component_id, 0))
        facts = [component.model, kernels_of(component), node and f"at {node}", component.trouble or pool]
        if any(facts):
            yield f"{component.component_id}: {', '.join(filter(None, facts))}"


def tenant_table(status: ClusterStatus) -> Table:
    """Return a table of each tenant's usage: its ended requests at the gateway that sent ``status``."""
    table = Table(title="Tenants of this gateway", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("tenant", overflow="fold")
    for name in ("prompt tokens", "cached", "computed", "generated", "KV GiB s"):
        table.add_column(name, justify="right")
    for tenant in status.tenants:
        usage = tenant.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.completion_tokens)
        kv_gib_s = sum(usage.kv_byte_seconds().values()) / 2**30
        table.add_row(tenant.tenant, *(f"{count:,}" for count in counts), f"{kv_gib_s:,.3f}")
    return table


def _in_order(status: ClusterStatus) -> list[ComponentStatus]:
    return sorted(status.components, key=lambda component: (component.role, component.component_id))


def _block_sizes(status: ClusterStatus) -> dict[str, int]:
    """Return tokens per block by KV node id. Workers report them; a node only has a block's size in bytes."""
    return {one.node_id: one.block_size_tokens for one in status.components if one.block_size_tokens}


def kernels_of(component: ComponentStatus) -> str:
    """Return the name of a worker's kernels, with the number of its tensor-parallel ranks if above 1."""
    ranks = component.tensor_parallel_size
    return f"{component.kernels}, {ranks} ranks" if ranks > 1 else component.kernels


def model_line(model: ModelInfo, status: ClusterStatus) -> str:
    """Describe a served name in one line."""
    if model.parent:
        ready = ", ".join(sorted(one.component_id for one in status.components if model.adapter in one.adapters))
        return f"{model.name}: adapter of {model.parent}, ready on {ready or 'no worker'}"
    if model.alias_of:
        return f"{model.name}: alias of {model.alias_of}"
    return f"{model.name}: up to {model.max_model_len_tokens:,} tokens; weights: {model.weights}"


def pool_use(component: ComponentStatus, block_size_tokens: int) -> str:
    """Describe a KV node's pool: usage, size, and blocks by state. Returns "" for other components."""
    if not component.total_blocks:
        return ""
    used = (component.total_blocks - component.free_blocks) / component.total_blocks
    size = f"{component.total_blocks:,} blocks"
    if block_size_tokens:
        size += f" = {component.total_blocks * block_size_tokens:,} tokens"
    states = f"{component.committed_blocks} cached, {component.leased_blocks} leased"
    if component.quarantined_blocks:
        states += f", {component.quarantined_blocks} quarantined"
    return f"{used:.1%} of {size} ({states})"


def version_line(status: ClusterStatus) -> str:
    """Return a line with the versions and protocols of all components; empty from a gateway of 0.2.0, which reports
    none."""
    groups: dict[tuple[str, int], list[str]] = {}
    for component in _in_order(status):
        groups.setdefault((component.version, component.protocol), []).append(component.component_id)
    if not any(protocol for _, protocol in groups):
        return ""
    labels = {group: f"{group[0] or 'unknown version'}, protocol {group[1]}" for group in groups}
    if len(groups) == 1:
        return f"all components: {next(iter(labels.values()))}"
    parts = (f"{labels[group]}: {_first_names(names)}" for group, names in groups.items())
    return f"versions differ: {'; '.join(parts)}"


def _first_names(names: Sequence[str]) -> str:
    """Join up to MAX_NAMED names with commas, and count those omitted."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def summary(status: ClusterStatus) -> str:
    """Return one line of totals since the gateway started."""
    rate = status.cached_tokens / status.prompt_tokens if status.prompt_tokens else 0.0
    index = "" if status.index_available else "; Redis is not responding: no prefix hits"
    return (
        f"{status.active_requests} active, {status.prompt_tokens:,} prompt tokens "
        f"({rate:.0%} found in the cache), {status.completion_tokens:,} generated{index}"
    )
