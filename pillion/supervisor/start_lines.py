"""Prints the five lines of a cluster's start: model, type, kernels, memory, and its addresses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pillion.cli.console import Notices
from pillion.config import ServeFlags
from pillion.supervisor.pool_fit import PoolFit, human_bytes
from pillion.supervisor.preflight import parser_names
from pillion.supervisor.probes import reachable_host


def show_model(
    notices: Notices,
    flags: ServeFlags,
    prepared: Any,
    fit: PoolFit | None,
    threads: int,
) -> None:
    """Print the first four lines of a cluster's start. ``prepared`` is the PreparedModel; ``threads`` are per worker on
    a CPU."""
    from pillion.engine.backends.devices import gpu_count
    from pillion.engine.checkpoints.prepare import choose_dtype
    from pillion.engine.models.config_parser import load_config
    from pillion.gateway.tokens.tokenizer import chat_template_of

    names = f"{prepared.name} (or {', '.join(prepared.aliases)})" if prepared.aliases else prepared.name
    template = chat_template_of(prepared.folder, flags.chat_template)
    tools, reasoning = parser_names(flags, template)
    parsers = f"tool call parser: {tools}, reasoning parser: {reasoning}"
    notices.fact("model", f"{names}, up to {prepared.max_model_len:,} tokens of prompt and answer; {parsers}")
    quantization = load_config(prepared.folder).quantization
    weights = f"; weights: {quantization.words}" if quantization is not None else ""
    kv = f", KV in {flags.kv_cache_dtype}" if flags.kv_cache_dtype != "auto" else ""
    notices.fact("type", f"{prepared.dtype}, {choose_dtype(flags.dtype)[1]}{weights}{kv}")
    workers = f"prefill workers: {flags.prefill_workers}, decode workers: {flags.decode_workers}"
    ranks = flags.prefill_tensor_parallel_size or flags.tensor_parallel_size, flags.tensor_parallel_size
    sizes = {ranks[1], ranks[0] if flags.prefill_workers else ranks[1]}
    if max(ranks) > 1:
        workers += f", of {ranks[0]} and {ranks[1]} processes"
    if flags.pipeline_parallel_size > 1:
        workers += f", prefill workers of {flags.pipeline_parallel_size} stages"
    if flags.device != "cpu":
        notices.fact("kernels", f"Triton's on {gpu_count() or 'no'} GPU; {workers}")
        weights_bytes = 0
    else:
        kernels, weights_bytes = _cpu_kernels(flags, prepared, sizes)
        notices.fact("kernels", f"{kernels}; {workers}, threads of each: {threads}")
    pool = "what --gpu-memory-utilization leaves"
    if fit is not None:
        pool = f"{human_bytes(flags.kv_pool_bytes)}, room for {fit.total_tokens:,} tokens"
    sharers = "all workers" if len(sizes) == 1 else "the workers of each size"
    packed = f"; weights {human_bytes(weights_bytes)}, shared by {sharers}" if weights_bytes else ""
    notices.fact("memory", f"KV pool {pool}{packed}{_steps(flags, fit)}")


def _steps(flags: ServeFlags, fit: PoolFit | None) -> str:
    """Describe the token budgets of steps and the memory of the largest steps. Returns "" if flags leave a budget to
    the workers on a GPU, which log their choice."""
    budgets = [("decode", flags.max_num_batched_tokens)]
    if flags.prefill_workers:
        budgets.insert(0, ("prefill", flags.max_num_batched_prefill_tokens))
    if not all(tokens for _, tokens in budgets):
        return ""
    limits = ", ".join(f"{tokens:,} ({role})" for role, tokens in budgets)
    memory = f", which take up to {human_bytes(fit.step_bytes)}" if fit is not None and fit.step_bytes else ""
    return f"; max tokens per step: {limits}{memory}"


def _cpu_kernels(flags: ServeFlags, prepared: Any, sizes: Collection[int]) -> tuple[str, int]:
    """Return a description of the CPU kernels, and the bytes of the packed weights of all ranks, for workers of these
    ``sizes`` (ranks per worker)."""
    from pillion.engine.backends.cpu.cpu_loading import choose_kernels
    from pillion.engine.checkpoints.model_cache import ModelCache
    from pillion.engine.load_model import shares_of
    from pillion.engine.models.config_parser import load_config

    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        return f"torch, for {reason}", 0
    config = load_config(prepared.folder)
    shards = [shard for size in sizes for shard in shares_of(config, size)]
    files = [ModelCache().packed_weights(prepared.fingerprint, f"cpu{shard.name}") for shard in shards]
    return f"{isa.label} on the CPU", sum(file.stat().st_size for file in files if file.exists())


def show_addresses(notices: Notices, flags: ServeFlags, seconds: float) -> None:
    """Print the fifth line of a cluster's start, and curl and chat commands to copy, with placeholders for keys and
    certificates."""
    host = reachable_host(flags.host)
    url = f"{'https' if flags.tls_cert else 'http'}://{host}:{flags.http_port}"
    page = f", web page {url}/ui" if flags.ui else ""
    notices.fact("ready", f"after {seconds:.1f} s: gRPC {host}:{flags.grpc_port}, HTTP {url}{page}", "bold green")
    notices.command(" ".join(_curl(flags, url)))
    notices.command(" ".join(_chat(flags, host)))


def _curl(flags: ServeFlags, url: str) -> list[str]:
    argv = ["curl", f"{url}/v1/completions", "-H 'Content-Type: application/json'"]
    if flags.tls_cert:
        argv += ["--cacert", "CA.pem"]
    if flags.tls_ca:
        argv += ["--cert", "CLIENT.pem", "--key", "CLIENT.key"]
    if flags.api_keys or flags.api_key:
        argv.append("-H 'Authorization: Bearer KEY'")
    body: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 32}
    if flags.also_model:
        body["model"] = next(iter(flags.served_model_name), flags.model)
    return [*argv, "-d", shlex.quote(json.dumps(body))]


def _chat(flags: ServeFlags, host: str) -> list[str]:
    argv = ["PILLION_API_KEY=KEY"] * bool(flags.api_keys or flags.api_key) + [own_command(), "chat"]
    if flags.tls_cert:
        argv += ["--target", f"grpcs://{host}:{flags.grpc_port}", "--ca", "CA.pem"]
    elif (host, flags.grpc_port) != ("127.0.0.1", 50051):
        argv += ["--target", f"{host}:{flags.grpc_port}"]
    if flags.tls_ca:
        argv += ["--cert", "CLIENT.pem", "--key", "CLIENT.key"]
    return argv


def own_command() -> str:
    """Return the command that runs this program from the working directory: ``pillion`` if it is on the PATH, else its
    path."""
    script, here = Path(sys.executable).with_name("pillion"), Path.cwd()
    on_path = shutil.which("pillion")
    if on_path and script.exists() and os.path.samefile(on_path, script):
        return "pillion"
    program = script if script.exists() else Path(sys.executable)
    shown = program.relative_to(here) if program.is_relative_to(here) else program
    return shlex.quote(str(shown)) + ("" if script.exists() else " -m pillion")
