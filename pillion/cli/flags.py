"""Options of commands: shared ones, and the flags of :mod:`pillion.config`.

A flag is a click option, an environment variable and a key of a file, and is converted back into an argv:

    --max-num-seqs 32  >  PILLION_MAX_NUM_SEQS=32  >  max-num-seqs = 32 in the --config file  >  default
                                      |
                       frozen dataclass --to_argv--> a component's command line

A repeatable flag is a tuple, a list in the file, and words in the environment. One file and one environment may serve
all components: a name that belongs to another component is ignored, an unknown name is an error.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from pillion import config
from pillion.cli.help_groups import write_commands, write_options
from pillion.errors import ConfigError
from pillion.near_names import did_you_mean

ENV_PREFIX = "PILLION_"
ALL_FLAGS = (config.KVNodeFlags, config.PrefillFlags, config.DecodeFlags, config.GatewayFlags, config.ServeFlags)
OTHER_VARIABLES = {
    "PILLION_CONFIG": "commands that take flags: the config file",
    "PILLION_CACHE": "workers and gateways: the folder of prepared models and compiled kernels",
    "PILLION_CHECK_KERNELS": "workers: bounds checks in CPU kernels",
    "PILLION_PARENT_PID": "components: the supervisor that started them",
    "PILLION_AWAITS_TURN": "components: set for a standby by its supervisor",
    "PILLION_TARGET": "client commands: the gateway's address",
    "PILLION_CA": "client commands: authorities",
    "PILLION_CERT": "client commands: a client's certificate",
    "PILLION_KEY": "client commands: the certificate's private key",
    "PILLION_CHAT_HISTORY": "pillion chat: no longer has an effect and will be removed in the next release",
    "PILLION_TAG": "docker-compose.yml: the image's tag",
    "PILLION_FUZZ": "tests: the number of malformed requests",
    "PILLION_VLLM": "benchmarks: vLLM's program",
    "PILLION_LLAMA_PYTHON": "benchmarks: the Python of llama-cpp-python",
}

# Flags without effect, accepted for one release with a warning: the class that they belonged to, and the explanation.
GONE: dict[str, tuple[type, str]] = {
    "vllm_metric_names": (config.CommonFlags, "metrics always have vLLM's names as well"),
    "lora_file_bytes": (config.LoraFlags, "an adapter may be up to 8 GiB"),
    "lora_transfer_timeout_s": (config.LoraFlags, "the transfer of an adapter between machines may take 120 s"),
    "max_waiting_tickets": (config.KVNodeFlags, "1,024 new requests may wait for the memory of a KV node"),
    "kv_log_changes": (config.KVNodeFlags, "a KV node keeps the newest 65,536 changes for its followers"),
    "max_kv_followers": (config.KVNodeFlags, "a KV node has at most 16 followers"),
    "max_tenant_pinned_percent": (config.KVNodeFlags, "prefix pins of one tenant may use a quarter of the pool"),
    "max_message_bytes": (config.GatewayFlags, "a gateway's gRPC messages are at most 16 MiB"),
    "cut_system_lines": (config.GatewayFlags, "Claude Code's billing line is always removed from system texts"),
    "max_retained_percent": (config.KVNodeFlags, "the block that rested longest is evicted first"),
    "max_tenant_retained_percent": (config.KVNodeFlags, "the block that rested longest is evicted first"),
    "batch_tenant_percent": (config.GatewayFlags, "a tenant may use a quarter of the space of --batch-path"),
    "allow_credentials": (config.GatewayFlags, "web pages send API keys, not cookies or certificates"),
    "verify_blocks": (config.KVNodeFlags, "the checksum of every received block is verified"),
    "log_file": (config.ServeFlags, "redirect standard error to a file: 2>FILE"),
    "keep_pool": (config.ServeFlags, "a pool in host memory always outlives its KV node"),
    "max_waiting_seqs": (config.DecodeFlags, "1,024 sequences may wait on a decode worker"),
    "measure": (config.PrepareFlags, "`python -m lab.benchmarks.quantization` shows what quantized weights cost"),
    "max_waiting_prefills": (config.PrefillFlags, "256 prefill ranges may wait or run on a prefill worker"),
    "fork_server": (config.ServeFlags, "components are always forked from a process that has imported their packages"),
    "standby": (config.ServeFlags, "each worker and KV node always has a standby"),
    "share_cores": (config.ServeFlags, "workers on a CPU always use the cores of idle workers, too"),
    "fence_kill_after_s": (config.ServeFlags, "a worker is killed after it has been fenced for 30 s"),
    "decode_reserve_percent": (config.PoolFlags, "prompts leave 10 % of the pool to running decodes"),
    "max_pinned_percent": (config.KVNodeFlags, "prefix pins may use half of the pool"),
    "state_percent": (config.KVNodeFlags, "states of hybrid models may use the whole pool"),
    "low_watermark_percent": (config.KVNodeFlags, "blocks are evicted ahead of need below 2 % of free slots"),
    "high_watermark_percent": (config.KVNodeFlags, "eviction ahead of need stops at 5 % of free slots"),
    "fetch_timeout_ms": (config.KVNodeFlags, "a fetch of blocks may take 2 s"),
    "max_fetch_bytes": (config.KVNodeFlags, "a fetch of blocks may transfer 1 GiB"),
    "hand_over_bytes_per_s": (config.KVNodeFlags, "a stopping KV node copies 64 MiB of warm blocks a second"),
    "lora_store_bytes": (config.LoraFlags, "copies of adapters may take 64 GiB of a machine"),
    "partial_block_percent": (config.DecodeFlags, "partial blocks of answers may use 1 % of the pool"),
    "max_running_requests": (config.GatewayFlags, "it is --max-num-seqs of all decode workers plus 25 %"),
    "max_read_ahead": (config.GatewayFlags, "KV of at most 2 waiting requests is read ahead at a time"),
    "max_attempts": (config.GatewayFlags, "a request fails after 4 attempts in a row without a token"),
    "timeout_keep_alive": (config.GatewayFlags, "idle HTTP connections are closed after 75 s"),
    "stream_ping_ms": (config.GatewayFlags, "streams without a token get a comment every 10 s"),
    "batch_bytes": (config.GatewayFlags, "the folder of --batch-path may use 10 GiB"),
    "batch_file_bytes": (config.GatewayFlags, "an uploaded file may be up to 200 MiB"),
    "batch_keep_days": (config.GatewayFlags, "files and ended batches are removed after 30 days"),
    "max_batch_requests": (config.GatewayFlags, "a gateway runs at most 32 requests of batches at a time"),
    "record_bytes": (config.GatewayFlags, "bundles may use 1 GiB in a folder and 64 MiB in Redis"),
    "record_days": (config.GatewayFlags, "bundles are removed after 30 days"),
    "record_slow_ms": (config.GatewayFlags, "a request is slow if it waits longer than 10 s for a token"),
}
# Removed flags that were switches, --NAME and --no-NAME; the others have a value.
GONE_SWITCHES = (
    *("vllm_metric_names", "verify_blocks", "keep_pool", "measure", "history", "allow_credentials"),
    *("fork_server", "standby", "share_cores"),
)

GONE_COMMANDS = {
    "pillion demo": "`make demo` in a clone of the repository runs it",
    "pillion certs": "`python -m lab.testbed.certs` in a clone of the repository takes the same options",
    "pillion models": "`pillion prepare OWNER/NAME` downloads a model, `hf download OWNER/NAME FILE.gguf` one file of"
    " it, and `hf cache` lists and removes them",
}

JSON_FLAGS = ("speculative_config", "override_generation_config", "default_chat_template_kwargs")
CONFIG_PATH = "config_path"
MODEL_ARGUMENT = "model_argument"
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")

F = TypeVar("F", bound=Callable[..., Any])


def option(name: str, about: str, default: Any = None, **more: Any) -> Callable[[F], F]:
    """Return an option that shows its default in the help. A second word of ``name`` is the parameter's name."""
    # click 8.5 treats an explicit None as a default, and does not enforce a required option that has a default.
    given = {} if more.get("required") else {"default": default, "show_default": default not in (None, "", ())}
    return click.option(*name.split(), help=about, **given, **more)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Combine the decorators of several options into one, in the order of the help."""

    def add(function: F) -> F:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return add


CA = option("--ca", "PEM of the trusted authorities. Default: the system's.", envvar="PILLION_CA")
CERT = option("--cert", "PEM of a client certificate, if the server requires one.", envvar="PILLION_CERT")
KEY = option("--key", "PEM of the client certificate's private key.", envvar="PILLION_KEY")
FILE = click.Path(dir_okay=False, path_type=Path)


def option_name(field_name: str) -> str:
    """Return a field's option: ``max_num_seqs`` -> ``--max-num-seqs``."""
    return "--" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    """Return a field's environment variable: ``max_num_seqs`` -> ``PILLION_MAX_NUM_SEQS``."""
    return ENV_PREFIX + field_name.upper()


def known_names() -> frozenset[str]:
    """Return the field names of all flags."""
    return frozenset(GONE).union(f.name for cls in ALL_FLAGS for f in fields(cls))


class FlagType(click.ParamType):  # type: ignore[type-arg]
    """click type of a flag, which parses text and TOML numbers with the flag's own parser. Errors are one line."""

    name = "text"

    def __init__(self, kind: Callable[[str], Any], choices: tuple[str, ...]) -> None:
        self.kind = kind
        self.choices = choices
        self.name = {config.parse_size: "size", int: "integer", float: "number"}.get(kind, "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder of the value in the help."""
        return "[" + "|".join(self.choices) + "]" if self.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a flag's text, TOML value or default, and check it against the choices."""
        text = str(value)
        try:
            parsed = self.kind(text)
        except ConfigError as error:
            self.fail(error.message, param, ctx)
        except ValueError:
            self.fail(f"{text!r} is not a valid {self.name}", param, ctx)
        if self.choices and parsed not in self.choices:
            self.fail(f"{text!r} is not one of {', '.join(self.choices)}", param, ctx)
        return parsed


class FlagCommand(click.Command):
    """A command that refuses unknown environment variables, and whose errors name the variable or the line of the file
    that set a flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, the environment and the file."""
        try:
            return super().parse_args(ctx, self._repeated(args))
        except click.BadParameter as error:
            if error.param is None:
                raise
            raise type(error)(error.message + _origin(ctx, error.param), ctx, error.param) from None

    def _repeated(self, args: list[str]) -> list[str]:
        """Repeat a repeatable flag before each of its values, because vLLM's flags take several: ``--lora-modules
        a=/a b=/b``. A word that can be the positional MODEL is MODEL."""
        options = {name: param for param in self.params if isinstance(param, click.Option) for name in param.opts}
        names = {word.partition("=")[0] for word in args}
        has_model = "--model" in names or all(param.name != MODEL_ARGUMENT for param in self.params)
        repeated: list[str] = []
        flag, wants_value = "", False
        for word in args:
            if wants_value:
                wants_value = False
            elif word.startswith("-"):
                option = options.get(word.partition("=")[0])
                flag = option.opts[0] if option is not None and option.multiple else ""
                wants_value = option is not None and not option.is_flag and "=" not in word
            elif flag and has_model:
                repeated.append(flag)
            else:
                flag, has_model = "", True
            repeated.append(word)
        return repeated

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help: flags of components in groups."""
        if any(param.name == CONFIG_PATH for param in self.params):
            write_options(self.get_params(ctx), ctx, formatter)
        else:
            super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Appends the origin of each flag that a ConfigError names to its message."""
        check_variables(os.environ)
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            if not (names := set(_FLAG.findall(error.message))) and (flag := _flag_of_path(ctx, error.message)):
                names, error.message = {flag}, f"{flag}: {error.message}"
            error.message += "".join(_origin(ctx, param) for param in self.params if names & set(param.opts))
            raise


class CommandGroup(click.Group):
    """Group of :class:`FlagCommand`. The top-level group lists its commands by purpose."""

    command_class = FlagCommand
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command on the line. Raises UsageError, which names the replacement of a removed command."""
        if (instead := GONE_COMMANDS.get(f"{ctx.command_path} {args[0]}")) is not None:
            ctx.fail(f"{ctx.command_path} {args[0]} was removed: {instead}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help, in groups for ``pillion`` itself."""
        if ctx.parent is None:
            write_commands(self.commands, formatter)
        else:
            super().format_commands(ctx, formatter)


def _origin(ctx: click.Context, param: click.Parameter) -> str:
    """Return, in brackets, the variable or the line that set a flag; "" for the command line and the default."""
    source, name = ctx.get_parameter_source(param.name or ""), param.opts[0]
    if source is click.core.ParameterSource.ENVIRONMENT:
        return f" ({name} is set by {param.envvar})"
    if source is click.core.ParameterSource.DEFAULT_MAP:
        path = ctx.meta[CONFIG_PATH]
        return f" ({name} is set by line {_line_of(param.opts, path)} of {path})"
    return ""


def _flag_of_path(ctx: click.Context, message: str) -> str:
    """Return the flag whose file or folder an error names; "" if there is none."""
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if value and isinstance(value, str | Path):
            path = Path(value).expanduser()
            if str(path.resolve()) in message or (os.sep in str(value) and str(value) in message):
                return "--model" if param.name == MODEL_ARGUMENT else param.opts[0]
    return ""


def _line_of(spellings: Iterable[str], path: str) -> int:
    """Return the line number that sets a flag in a TOML file without tables."""
    keys = "|".join(spelling[2:].replace("-", "[-_]") for spelling in spellings)
    pattern = re.compile(rf"\s*[\"']?({keys})[\"']?\s*=")
    lines = Path(path).read_text("utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


def flag_options(cls: type, *, placement: bool = True) -> Callable[[F], F]:
    """Decorate a click command with one option per field of ``cls``, and ``--config``.

    The command's function receives every field as a parsed keyword argument. ``placement=False`` omits the flags that
    identify or place one process, for commands that choose them per component.
    """
    file = click.option(
        "--config",
        CONFIG_PATH,
        envvar=ENV_PREFIX + "CONFIG",
        metavar="PATH",
        is_eager=True,
        expose_value=False,
        callback=_read_environment_and_file,
        help="TOML file with any of these flags as keys.",
    )
    current = [flag_option(f) for f in fields(cls) if placement or not f.metadata["placement"]]
    gone = [gone_option(name, about) for name, (owner, about) in GONE.items() if issubclass(cls, owner)]
    return options(file, *current, *gone)


def gone_option(name: str, about: str) -> Callable[[F], F]:
    """Return the hidden option of a flag without effect."""

    def warn(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        # Components inherit the environment of a supervisor that has warned already.
        if value not in (None, ()) and "PILLION_PARENT_PID" not in os.environ:
            click.echo(
                f"Warning: {option_name(name)} has no effect and will be removed in the next release: {about}", err=True
            )

    spelled = option_name(name)
    form: dict[str, Any] = {"multiple": True}
    if name in GONE_SWITCHES:
        spelled, form = f"{spelled}/--no-{spelled[2:]}", {"type": bool, "default": None}
    return click.option(spelled, name, envvar=env_name(name), expose_value=False, hidden=True, callback=warn, **form)


def flag_option(field: Field[Any]) -> Callable[[F], F]:
    """Return the click option of one flag."""
    name, about = option_name(field.name), field.metadata
    common: dict[str, Any] = {
        "envvar": env_name(field.name),
        "default": field.default,
        "show_default": str(field.default) != "",
        "help": about["help"],
    }
    if about["kind"] is bool:
        return click.option(f"{name}/--no-{name[2:]}", field.name, type=bool, **common)
    if isinstance(field.default, tuple):
        common |= {"multiple": True, "show_default": False}
    also = [option_name(about["also"])] if about["also"] else []
    return click.option(name, *also, field.name, type=FlagType(about["kind"], about["choices"]), **common)


def _read_environment_and_file(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path:
        ctx.meta[CONFIG_PATH] = path
        ctx.default_map = {**(ctx.default_map or {}), **read_config(path)}


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for the first ``PILLION_*`` variable that nothing reads."""
    known = {*map(env_name, known_names()), *OTHER_VARIABLES}
    # Kubernetes injects variables for each service of the namespace; a service may be called pillion-something.
    services = [name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")]
    links = tuple(prefix + kind for prefix in services for kind in ("SERVICE_", "PORT"))
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(links):
            hint = did_you_mean(name, known, len(ENV_PREFIX))
            raise ConfigError(f"unknown environment variable {name}{hint}")


def read_config(path: str) -> dict[str, Any]:
    """Read a TOML file of flags, as values by field name. Raises a one-line ConfigError for an unusable file."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    known, values = known_names(), {}
    aliases = {f.metadata["also"]: f.name for cls in ALL_FLAGS for f in fields(cls) if f.metadata["also"]}
    repeatable = {f.name for cls in ALL_FLAGS for f in fields(cls) if isinstance(f.default, tuple)}
    for key, value in table.items():
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in known:
            hint = did_you_mean(key, [flag.replace("_", "-") for flag in known])
            raise ConfigError(f"config file {path}: unknown key {key!r}{hint}")
        if name in values:
            raise ConfigError(f"config file {path}: {key!r} occurs twice")
        if name in GONE and name not in GONE_SWITCHES:
            value = value if isinstance(value, list) else [value]
        elif name in repeatable:
            if isinstance(value, str) and name == "served_model_name":
                value = [value]
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"config file {path}: {key!r} must be a list of strings")
        elif name in JSON_FLAGS and isinstance(value, dict):
            value = json.dumps(value)
        elif not isinstance(value, str | int | float):
            raise ConfigError(f"config file {path}: {key!r} must be a string or a number")
        values[name] = value
    return values


def to_argv(flags: Any, exclude: Iterable[str] = ()) -> list[str]:
    """Return the fields of ``flags`` as arguments, defaults included, so that a child's flags do not depend on its
    environment. Omits the fields named in ``exclude``, and secrets, because all users of the machine can read them."""
    excluded, argv = frozenset(exclude), []
    for field in fields(flags):
        if field.name in excluded or field.metadata["secret"]:
            continue
        value, name = getattr(flags, field.name), option_name(field.name)
        if isinstance(value, bool):
            argv.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, tuple):
            argv += [f"{name}={item}" for item in value]
        else:
            argv.append(f"{name}={value}")
    return argv


def secret_environ(flags: Any) -> dict[str, str]:
    """Return the variables that pass the secrets of ``flags`` to a child."""
    secrets = {env_name(f.name): getattr(flags, f.name) for f in fields(flags) if f.metadata["secret"]}
    return {name: " ".join(values) for name, values in secrets.items() if values}


def without_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without flags: a child gets them only by its command line."""
    flags = {*map(env_name, known_names()), ENV_PREFIX + "CONFIG"}
    return {name: value for name, value in environ.items() if name not in flags}


def subset(cls: type, source: Any, **changes: Any) -> Any:
    """Return an instance of ``cls`` with the fields that it shares with ``source``, updated by ``changes``."""
    shared = {f.name for f in fields(cls)} & {f.name for f in fields(source)}
    return cls(**{name: getattr(source, name) for name in shared} | changes)
