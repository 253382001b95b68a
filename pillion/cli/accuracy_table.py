"""Prints the table of `pillion prepare --quantization`, which shows what quantized weights cost in accuracy."""

from __future__ import annotations

import click

from pillion.cli.flags import subset
from pillion.config import ComputeFlags, DecodeFlags


def show_accuracy(flags: ComputeFlags) -> None:
    """Compares plain and quantized weights on the CPU, which takes a minute, and prints a table of both. Raises
    ConfigError."""
    from rich.console import Console
    from rich.table import Table

    from pillion.engine.quantized.accuracy import TEXT, compare_weights

    click.echo("comparing quantized weights with plain ones")
    plain, quantized = (
        subset(DecodeFlags, flags, device="cpu", kv_cache_dtype="auto", quantization=kind)
        for kind in ("none", flags.quantization)
    )
    found = compare_weights(plain, quantized)
    table = Table(title=f"{found[0].tokens} tokens of {TEXT}")
    for heading in ("weights", "perplexity", "KL divergence", "top-1 agreement"):
        table.add_column(heading, justify="right")
    for kind, each in zip(("plain", flags.quantization), found, strict=True):
        table.add_row(kind, f"{each.perplexity:.3f}", f"{each.mean_divergence:.4f}", f"{each.agreement:.1%}")
    Console().print(table)
