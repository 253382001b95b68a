"""Groups of flags and commands in the help."""

from __future__ import annotations

from collections.abc import Mapping

import click

COMMANDS = {
    "Run a cluster": "serve prepare",
    "Use a running cluster": "chat generate status cache adapters events",
    "Measure and plan": "bench drill",
    "Records of requests": "explain replay canary",
    "Keys": "keys",
    "Run one component": "gateway prefill decode kvnode keeper health",
    "About this program": "version",
}
# Flags by title of their group, in the order of the help. A prefix such as "kv" stands for all flags that begin with
# it. Flags in no group are listed under OTHERS; a test checks that there are none.
GROUPS = {
    "Model": "model tokenizer served_model_name also_model revision dtype quantization activation_quantization"
    " load_format ignore max_model_len",
    "Adapters": "enable_lora max_loras max_lora_rank lora allow_runtime_lora_updating",
    "Answers": "generation_config override_generation_config chat_template allow_special default_chat_template_kwargs"
    " tool_call_parser reasoning_parser enable_auto_tool_choice",
    "Public ports": "host root_path http_port grpc_port ui allowed share_ports strict_fields",
    "Keys and certificates": "api_keys api_key tls internal_tls insecure_internal",
    "Processes": "prefill_workers decode_workers gateway_workers tensor_parallel_size prefill_tensor_parallel_size"
    " pipeline_parallel_size enable_expert_parallel device cpu core_lending_table first_core"
    " enforce_eager batch_invariant exact_weights drain_timeout_s",
    "KV cache": "kv gpu_memory_utilization block_size enable_prefix_caching"
    " hand_over host_bytes disk object keeper_socket",
    "Scheduling": "max_num target_itl_ms speculative_config split_policy chunk_size enable_chunked_prefill",
    "Limits of a gateway": "max_inflight",
    "Batches": "batch",
    "Records of requests": "record",
    "Cluster": "redis_url heartbeat component_id node attach_socket listen advertise probe_listen",
    "Logs and metrics": "log metrics",
}
OTHERS = "Others"

OPTIONS = "Options"


def group_of(field_name: str) -> str:
    """Return the title of the group that lists the flag, or else the longest prefix of its name before a "_"."""
    words = field_name.split("_")
    for count in range(len(words), 0, -1):
        prefix = "_".join(words[:count])
        for title, names in GROUPS.items():
            if prefix in names.split():
                return title
    return OTHERS


def write_commands(commands: Mapping[str, click.Command], formatter: click.HelpFormatter) -> None:
    """Write the commands of ``pillion`` in groups, one line each."""
    for title, names in COMMANDS.items():
        with formatter.section(title):
            longest = max(map(len, commands))
            listed = [name for name in names.split() if name in commands]
            rows = [(name.ljust(longest), commands[name].get_short_help_str(formatter.width)) for name in listed]
            formatter.write_dl(rows)


def write_options(params: list[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a command's options: flags of :mod:`pillion.config` in groups, preceded by all others."""
    rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (OPTIONS, *GROUPS, OTHERS)}
    for param in params:
        row = param.get_help_record(ctx)
        if row is not None and isinstance(param, click.Option):
            is_flag = param.expose_value and param.name != "help"
            rows[group_of(param.name or "") if is_flag else OPTIONS].append(row)
    for title, listed in rows.items():
        if listed:
            with formatter.section(title):
                formatter.write_dl(listed)
