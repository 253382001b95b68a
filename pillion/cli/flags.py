"""The frozen dataclasses of :mod:`pillion.config` as click options, and back into an argv.

A field ``max_num_seqs`` is ``--max-num-seqs``, ``PILLION_MAX_NUM_SEQS`` and the key ``max-num-seqs`` (or
``max_num_seqs``) of one optional TOML file. One that may be said several times is a tuple, and a list in the file. The
command line wins over the environment, that over the file, and the file over the default. One file may serve all parts:
a key that another part knows is ignored, one that no part knows is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from pillion import config
from pillion.errors import ConfigError

ENV_PREFIX = "PILLION_"
ALL_FLAGS = (
    config.KVNodeFlags,
    config.PrefillFlags,
    config.DecodeFlags,
    config.GatewayFlags,
    config.ServeFlags,
)

F = TypeVar("F", bound=Callable[..., Any])


def option_name(field_name: str) -> str:
    """``max_num_seqs`` -> ``--max-num-seqs``."""
    return "--" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    """``max_num_seqs`` -> ``PILLION_MAX_NUM_SEQS``."""
    return ENV_PREFIX + field_name.upper()


def known_names() -> frozenset[str]:
    """Field names of every part's flags."""
    return frozenset(f.name for cls in ALL_FLAGS for f in fields(cls))


class FlagType(click.ParamType):  # type: ignore[type-arg]
    """Text (or a TOML number) through the flag's own parser, with one clear line when it does not parse."""

    name = "text"

    def __init__(self, kind: Callable[[str], Any], choices: tuple[str, ...]) -> None:
        self.kind = kind
        self.choices = choices
        self.name = {config.parse_size: "size", int: "integer", float: "number"}.get(kind, "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What stands behind the option in the help."""
        return "[" + "|".join(self.choices) + "]" if self.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Defaults come through here too, so that text and value are treated alike."""
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


def flag_options(cls: type, leave_out: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorates a click command with one option per field of ``cls``, and ``--config``.

    The command's function receives every field as a keyword argument, parsed.
    """
    left_out = frozenset(leave_out)

    def decorate(function: F) -> F:
        for field in reversed(fields(cls)):
            if field.name not in left_out:
                function = _option(field)(function)
        return click.option(
            "--config",
            "config_path",
            envvar=ENV_PREFIX + "CONFIG",
            metavar="PATH",
            is_eager=True,
            expose_value=False,
            callback=_read_config,
            help="TOML file with any of these flags as keys.",
        )(function)

    return decorate


def _option(field: Field[Any]) -> Callable[[F], F]:
    name, about = option_name(field.name), field.metadata
    common: dict[str, Any] = {
        "envvar": env_name(field.name),
        "default": field.default,
        "show_default": field.default != "",
        "help": about["help"],
    }
    if about["kind"] is bool:
        return click.option(f"{name}/--no-{name[2:]}", field.name, type=bool, **common)
    if isinstance(field.default, tuple):
        # In the environment several are separated by white space.
        common |= {"multiple": True, "show_default": False}
    return click.option(name, field.name, type=FlagType(about["kind"], about["choices"]), **common)


def _read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path:
        ctx.default_map = {**(ctx.default_map or {}), **read_config(path)}


def read_config(path: str) -> dict[str, Any]:
    """Field name -> value of a TOML file. Raises ConfigError, in one line, for a file that cannot be used."""
    try:
        with open(path, "rb") as file:
            said = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    known, values = known_names(), {}
    several = {f.name for cls in ALL_FLAGS for f in fields(cls) if isinstance(f.default, tuple)}
    for key, value in said.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"config file {path}: unknown key {key!r}")
        if name in values:
            raise ConfigError(f"config file {path}: {key!r} is said twice")
        if name in several:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ConfigError(f"config file {path}: {key!r} must be a list of texts")
        elif not isinstance(value, str | int | float):
            raise ConfigError(f"config file {path}: {key!r} must be a text or a number")
        values[name] = value
    return values


def to_argv(flags: Any, leave_out: Iterable[str] = ()) -> list[str]:
    """Every field of ``flags`` as an argument, defaults too: what the child reads depends on nothing around it."""
    left_out, argv = frozenset(leave_out), []
    for field in fields(flags):
        if field.name in left_out:
            continue
        value, name = getattr(flags, field.name), option_name(field.name)
        if isinstance(value, bool):
            argv.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, tuple):
            argv += [f"{name}={one}" for one in value]
        else:
            argv.append(f"{name}={value}")
    return argv


def without_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` less every variable that is a flag: what was meant for the parent is not said to a child again."""
    ours = {env_name(name) for name in known_names()} | {ENV_PREFIX + "CONFIG"}
    return {name: value for name, value in environ.items() if name not in ours}


def subset(cls: type, source: Any, **changes: Any) -> Any:
    """An instance of ``cls`` with the fields that ``source`` has too, and ``changes``."""
    shared = {f.name for f in fields(cls)} & {f.name for f in fields(source)}
    return cls(**{name: getattr(source, name) for name in shared} | changes)
