"""The ``pillion`` command. Importing this module is cheap: each command imports what it needs when it runs."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from pillion._version import PROTOCOL, VERSION
from pillion.cli.adapters_command import adapters
from pillion.cli.bench_command import bench
from pillion.cli.cache_command import cache
from pillion.cli.console import fail
from pillion.cli.drill_command import drill
from pillion.cli.events_command import events
from pillion.cli.explain_command import explain
from pillion.cli.flags import CA, MODEL_ARGUMENT, CommandGroup, flag_options, gone_option, option, option_name, options
from pillion.cli.reach import as_component, pop_reach, talks_to_gateway
from pillion.cli.replay_commands import canary, replay
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags, PrepareFlags, ServeFlags
from pillion.errors import ConfigError, PillionError
from pillion.net.addresses import spare_loopback
from pillion.types import SAMPLING_OPTIONS

F = TypeVar("F", bound=Callable[..., Any])


class ExitStatus(IntEnum):
    """Exit status of a command that did not succeed; INTERRUPTED is a shell's status for SIGINT."""

    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


def _open_standard_descriptors() -> None:
    """Open /dev/null as each closed standard descriptor. Otherwise the next socket could become descriptor 2, and
    receive what libraries write to standard error."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def main(argv: list[str] | None = None) -> None:
    run_command(cli, argv, "pillion")


def run_command(command: click.Command, argv: list[str] | None, name: str) -> None:
    """Run a command line and exit. Expected errors print one line to standard error; others are bugs and raise."""
    # An ignored SIGCHLD is inherited from the parent, and would lose the exit status of children.
    if sys.platform != "win32":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _open_standard_descriptors()
    spare_loopback()
    try:
        code = command.main(argv, prog_name=name, standalone_mode=False)
    except click.Abort:
        code = ExitStatus.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = ExitStatus.USAGE
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else name
        fail(f"{error.format_message()} (see {where} --help)")
        code = ExitStatus.USAGE
    except PillionError as error:
        if logging.getLogger("pillion").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        fail(error.message)
        code = ExitStatus.USAGE if isinstance(error, ConfigError) else ExitStatus.FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pillion"):
            raise
        fail(f"this needs the package {error.name}, which is not installed: pip install 'pillion[server]'")
        code = ExitStatus.USAGE
    except KeyboardInterrupt:
        code = ExitStatus.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitStatus.FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        fail(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
        code = ExitStatus.FAILED
    sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="pillion")
def cli() -> None:
    """Serve language models with prefill and decode split over one KV store."""


for command in (adapters, bench, cache, canary, drill, events, explain, replay):
    cli.add_command(command)


def takes_model(function: F) -> F:
    """Add the positional argument MODEL, an alternative to --model."""

    def choose(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        has_option = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
        if value and has_option and ctx.params.get("model") != value:
            raise click.UsageError("give the model only once: MODEL or --model", ctx)
        return value

    return click.argument(MODEL_ARGUMENT, metavar="[MODEL]", required=False, callback=choose)(function)


def with_model(cls: Any, values: dict[str, Any]) -> Any:
    """Return ``cls(**values)``, with the model from the argument MODEL, --model or the default, in this order."""
    model = values.pop(MODEL_ARGUMENT) or values["model"] or "demo"
    return cls(**values | {"model": model})


@cli.command()
@takes_model
@flag_options(ServeFlags, placement=False)
def serve(**values: Any) -> int:
    """Run the whole cluster on this machine until Ctrl-C.

    MODEL is a Hugging Face folder, a GGUF file, a hub id, or 'demo' (the default).
    """
    from pillion.supervisor.serve import run_serve

    return run_serve(with_model(ServeFlags, values))


def component_command(role: str, cls: Any, about: str, *, has_model: bool = True) -> None:
    """Add the command ``role``, which runs one component with the flags of class ``cls``. ``about`` is its help."""

    def run(**values: Any) -> int:
        from pillion.supervisor.component_process import end_process, run_component

        flags = with_model(cls, values) if has_model else cls(**values)
        return end_process(run_component(role, flags))

    run.__doc__ = about
    function: Any = flag_options(cls)(run)
    cli.command(role)(takes_model(function) if has_model else function)


component_command("gateway", GatewayFlags, "Run one gateway: the public gRPC and HTTP edge.")
component_command("prefill", PrefillFlags, "Run one prefill worker.")
component_command("decode", DecodeFlags, "Run one decode worker.")
component_command("kvnode", KVNodeFlags, "Run one KV node: the owner of this host's pool.", has_model=False)


@cli.command()
@click.argument("socket")
def keeper(socket: str) -> None:
    """Preserve the pools of this host's KV nodes when a node dies.

    It listens at the Unix socket SOCKET, the nodes' --keeper-socket. It only holds the pools' memory, and ends on a
    signal.
    """
    from pillion.kvstore.pool_survival.keeper_process import run_keeper

    run_keeper(socket)


@cli.command()
@takes_model
@flag_options(PrepareFlags)
def prepare(**values: Any) -> None:
    """Prepare MODEL in the cache, so that components start faster."""
    from pillion.supervisor.component_process import PREPARED, require_server_packages

    require_server_packages()
    # To be set before torch is imported. Threads spinning at OpenMP's barriers took 10 of 18 CPU seconds on two busy
    # cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Garbage collection takes a fifth of the time of these imports and frees nothing.
    gc.disable()
    from pillion.engine.load_model import make_ready

    gc.enable()
    flags = with_model(PrepareFlags, values)
    prepared = make_ready(flags, click.echo)
    click.echo(f"{prepared.name} {PREPARED} {prepared.folder}")


def bias_by_id(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[int, float]:
    """Parse ID=VALUE options."""
    biases = {}
    for text in texts:
        token_id, _, value = text.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not ID=VALUE, such as 42=-5", ctx, param) from None
    return biases


sampling_options = options(
    option("--model", "Served model name; optional if one model is served.", ""),
    option("--max-tokens", "Maximum number of tokens to generate.", type=int),
    option("--min-tokens", "Minimum number of tokens before a stop.", type=int),
    *(
        option(option_name(name), sampling_option.about, type=int if sampling_option.whole else float)
        for name, sampling_option in SAMPLING_OPTIONS.items()
        if sampling_option.about
    ),
    option(
        "--logit-bias",
        "Added to a token's logit. Repeatable.",
        (),
        metavar="ID=VALUE",
        multiple=True,
        callback=bias_by_id,
    ),
    option("--stop", "Text that ends the answer. Repeatable.", (), multiple=True),
    option("--stop-token-id stop_token_ids", "Id that ends the answer. Repeatable.", (), type=int, multiple=True),
    option("--ignore-eos", "Continue past the model's end-of-text token.", is_flag=True),
    option("--logprobs", "Show each token's log probability and this many alternatives.", type=int),
    option("--priority", "From -100 to 100; smaller is more urgent, 0 is the default.", type=int),
)
answer_options = options(
    option("--n", "Number of answers, shown one after the other.", type=int),
    option("--best-of", "Generate this many answers and show the most likely ones.", type=int),
)


@cli.command()
@click.argument("prompt")
@talks_to_gateway
@sampling_options
@answer_options
@option("--schema", "File with a JSON schema for every answer.", type=click.File(encoding="utf-8"))
def generate(prompt: str, schema: TextIO | None, **values: Any) -> None:
    """Stream a continuation of PROMPT ('-': of standard input)."""
    from pillion.cli.talk import run_generate

    text = "" if schema is None else schema.read()
    run_generate(sys.stdin.read() if prompt == "-" else prompt, pop_reach(values), values, text)


@cli.command()
@option("--system", "System message of the conversation.", "")
@gone_option("history", "lines typed at a terminal are remembered for one conversation only")
@talks_to_gateway
@sampling_options
def chat(system: str, **values: Any) -> None:
    """Talk with the model.

    Each line is a message, /help lists commands, Ctrl-D ends.

    If standard input is not a terminal, each of its lines is a message.
    """
    from pillion.cli.chat import run_chat

    run_chat(system, pop_reach(values), values)


@cli.command()
@option("--json as_json", "Print JSON.", False, is_flag=True)
@talks_to_gateway
def status(as_json: bool, **values: Any) -> None:
    """Show the components, their load, the pool and the hit rate."""
    from pillion.cli.talk import run_status

    run_status(pop_reach(values), as_json)


@cli.command()
@click.argument("address")
@options(CA)
@as_component
def health(address: str, ca: str | None, internal_tls_cert: str, internal_tls_key: str, internal_tls_ca: str) -> int:
    """Ask the component at ADDRESS whether it is healthy.

    The exit status is the answer of its gRPC health service.

    ADDRESS is host:port or unix:path, or grpcs://host:port for a public port with TLS. If components use TLS among
    themselves, pass the component's own certificate.
    """
    import asyncio

    from pillion.client.connection import connect, connection_hint
    from pillion.net import rpc, tls
    from pillion.supervisor.probes import health_behind

    rpc.use_identity(tls.identity_of(internal_tls_cert, internal_tls_key, internal_tls_ca))
    public = address.startswith("grpcs://")

    async def ask() -> bool | None:
        direct = replace(connect(address, ca=ca or None), by_proxy=False) if public else None
        return await health_behind(rpc.open_channel(address) if direct is None else direct.open_async())

    if asyncio.run(ask()):
        click.echo("serving")
        return 0
    place, encrypted = address.removeprefix("grpcs://"), public or bool(internal_tls_cert)
    click.echo(f"{address} is not serving; {connection_hint(place, encrypted)}")
    return ExitStatus.FAILED


@cli.group()
def keys() -> None:
    """Make API keys for a gateway's --api-keys file."""


@keys.command("add")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@option("--tenant", "The key's tenant; a new tenant is added, without quotas.", required=True)
@option("--operator", "Let a new tenant see the whole cluster, as pillion status shows it.", False, is_flag=True)
@option(
    "--models",
    "A model or adapter that a new tenant may use; default: all. Repeatable.",
    (),
    multiple=True,
)
def keys_add(file: Path, tenant: str, operator: bool, models: tuple[str, ...]) -> None:
    """Add a new key to FILE and print it. The key is shown only once: FILE stores only its hash."""
    from pillion.cli.keys import add_key

    click.echo(add_key(file, tenant, operator, models))


@keys.command("hash")
def keys_hash() -> None:
    """Read an existing key from standard input and print its hash for a keys file."""
    from pillion.cli.keys import hash_key

    click.echo(hash_key(sys.stdin.readline()))


@cli.command()
def version() -> None:
    """Print the version and the protocol number."""
    click.echo(f"pillion {VERSION} (protocol {PROTOCOL})")
