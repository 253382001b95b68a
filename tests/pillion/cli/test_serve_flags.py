"""Every flag of every component, through `pillion serve`: from the command line, the environment or a file to the
component's process. The tests derive from the components' classes, so a new flag is tested at once."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pillion import config
from pillion.cli.app import cli
from pillion.cli.flags import OTHER_VARIABLES, check_variables, env_name, flag_options, known_names, option_name
from pillion.config import ComputeFlags, DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags, ServeFlags
from pillion.engine.backends.devices import resolved
from pillion.errors import ConfigError
from pillion.supervisor import serve
from pillion.supervisor.component_process import STOP_GRACE_S
from pillion.supervisor.local_cluster import process_specs

COMPONENTS: dict[str, Any] = {
    "kvnode": KVNodeFlags,
    "prefill": PrefillFlags,
    "decode": DecodeFlags,
    "gateway": GatewayFlags,
}
FORWARDED = [
    (role, field) for role, cls in COMPONENTS.items() for field in fields(cls) if not field.metadata["placement"]
]
# What is given to `pillion serve` where any other value would not do.
GIVEN = {
    "device": "cpu",
    "cpu_affinity": "0,1",
    "metrics_port": "9500",
    "load_format": "auto",
    "kv_cache_dtype": "auto",
    "allowed_origins": "https://chat.example.org",
    "target_itl_ms": "75.5",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "override_generation_config": '{"temperature": 0.6}',
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "root_path": "/models/small",
}
# What a process gets where it is not what was given: shares of cores, ports one after the other, one process of
# several, and the gateway drains for all.
RECEIVED: dict[tuple[str, str], Any] = {
    ("prefill", "cpu_affinity"): "0",
    ("decode", "cpu_affinity"): "1",
    ("gateway", "metrics_port"): 9500,
    ("kvnode", "metrics_port"): 9501,
    ("prefill", "metrics_port"): 9502,
    ("decode", "metrics_port"): 9503,
    ("gateway", "gateway_workers"): 1,
    ("decode", "pipeline_parallel_size"): 1,
    ("prefill", "drain_timeout_s"): STOP_GRACE_S,
    ("decode", "drain_timeout_s"): STOP_GRACE_S,
}


def text_of(field: Field[Any]) -> str:
    """Return a value that is not the default, as a user would write it."""
    if field.name in GIVEN:
        return GIVEN[field.name]
    if field.metadata["choices"]:
        return str(next(choice for choice in field.metadata["choices"] if choice != field.default))
    if isinstance(field.default, bool):
        return str(not field.default).lower()
    if isinstance(field.default, str | tuple):
        return "fraction:1/3" if field.name == "split_policy" else "x=y"
    return str(field.default + 1)


def on_the_command_line(field: Field[Any], text: str, folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    name = option_name(field.name)
    if field.metadata["kind"] is bool:
        return [name if text == "true" else f"--no-{name[2:]}"], {}
    return [name, text], {}


def in_the_environment(field: Field[Any], text: str, folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    return [], {env_name(field.name): text}


def in_a_file(field: Field[Any], text: str, folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    file = folder / "pillion.toml"
    value = f"['{text}']" if isinstance(field.default, tuple) else text if text in ("true", "false") else f"'{text}'"
    file.write_text(f"{field.name.replace('_', '-')} = {value}\n")
    return ["--config", str(file)], {}


def parsed(cls: Any, argv: tuple[str, ...], environ: dict[str, str]) -> Any:
    """Return the flags that a component's process reads from its command line and environment."""
    made: list[Any] = []

    @click.command()
    @flag_options(cls)
    def command(**values: Any) -> None:
        made.append(cls(**values))

    mine = {name: value for name, value in environ.items() if name.startswith("PILLION_")}
    result = CliRunner().invoke(command, list(argv), env=mine, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return made[0]


def served(monkeypatch: pytest.MonkeyPatch, argv: list[str], environ: dict[str, str]) -> ServeFlags:
    """Return the flags of a `pillion serve`."""
    ran: list[ServeFlags] = []
    monkeypatch.setattr(serve, "run_serve", lambda flags: ran.append(flags) or 0)
    result = CliRunner().invoke(cli, ["serve", *argv], env=environ, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return ran[0]


def ways() -> Iterator[Any]:
    """Every flag of every component in each way. In ``make test`` a flag of several components is tested in the
    environment and in a file for only one of them."""
    seen = set()
    for give in (on_the_command_line, in_the_environment, in_a_file):
        for role, field in FORWARDED:
            again = give is not on_the_command_line and (give, field.name) in seen
            seen.add((give, field.name))
            marks = [pytest.mark.long] if again else []
            yield pytest.param(role, field, give, marks=marks, id=f"{role}-{field.name}-{give.__name__}")


@pytest.mark.parametrize(("role", "field", "give"), list(ways()))
def test_every_flag_of_a_component_reaches_its_process(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    role: str,
    field: Field[Any],
    give: Callable[[Field[Any], str, pathlib.Path], tuple[list[str], dict[str, str]]],
) -> None:
    monkeypatch.setattr("pillion.host.cores.allowed_cores", lambda: frozenset(range(8)))
    text = text_of(field)
    argv, environ = give(field, text, tmp_path)
    flags = served(monkeypatch, argv, environ)
    if field.name != "device":
        monkeypatch.setattr("pillion.engine.backends.devices.resolve_device", lambda flags: "cpu")
    specs = process_specs(resolved(flags), pathlib.Path("/run/x"), None)
    spec = next(spec for spec in specs if spec.component_id == f"{role}-0")
    received = getattr(parsed(COMPONENTS[role], spec.argv[4:], dict(spec.environ)), field.name)
    kind = field.metadata["kind"]
    given = text == "true" if kind is bool else (text,) if isinstance(field.default, tuple) else kind(text)
    assert received == RECEIVED.get((role, field.name), given)
    if field.name not in GIVEN:
        assert given != field.default


def test_serve_has_no_component_placement_flags() -> None:
    placed = {field.name for cls in COMPONENTS.values() for field in fields(cls) if field.metadata["placement"]}
    assert {"node_id", "component_id", "listen", "node_listen", "attach_socket", "kv_device"} <= placed
    assert not placed & {param.name for param in cli.commands["serve"].params}


@pytest.mark.parametrize(("role", "cls"), [*COMPONENTS.items(), ("serve", ServeFlags), ("prepare", ComputeFlags)])
def test_every_flag_is_in_the_help(role: str, cls: Any) -> None:
    command = cli.commands[role]
    with click.Context(command) as ctx:
        words = command.get_help(ctx).replace(",", " ").split()
    options = {name for word in words for name in word.split("/") if name.startswith("--")}
    for field in fields(cls):
        placed = role == "serve" and field.metadata["placement"]
        assert (option_name(field.name) in options) is not placed, field.name
    assert "--config" in options


def test_every_flag_is_declared_once() -> None:
    """``flag(...)`` occurs once for each name; a class that differs, differs only in the default."""
    declared: list[str] = []
    for node in ast.walk(ast.parse(pathlib.Path(config.__file__).read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            assert isinstance(node.value.func, ast.Name)
            assert isinstance(node.target, ast.Name)
            if node.value.func.id in ("flag", "size_flag"):
                declared.append(node.target.id)
            else:
                assert node.value.func.id == "with_default"
    assert len(declared) == len(set(declared))
    assert {field.name for cls in (ServeFlags, config.OfflineFlags) for field in fields(cls)} == set(declared)


@pytest.mark.parametrize("role", [*COMPONENTS, "serve", "prepare"])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("PILLION_MAX_NUM_SEQ", "PILLION_MAX_NUM_SEQ; did you mean PILLION_MAX_NUM_SEQS?"),
        ("PILLION_XYZZY", "PILLION_XYZZY"),
    ],
)
def test_an_unknown_variable_is_rejected_by_name(role: str, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(cli, [role], env={name: "1"}, standalone_mode=False, catch_exceptions=False)
    assert caught.value.message == f"unknown environment variable {complaint}"


def test_variables_of_other_programs_are_left_alone() -> None:
    links = {f"PILLION_REDIS_{name}": "x" for name in ("SERVICE_HOST", "SERVICE_PORT_DB", "PORT", "PORT_6379_TCP_ADDR")}
    check_variables({"PILLION_CACHE": "/cache", "PILLION_API_KEY": "key", "HOME": "/", **links})
    with pytest.raises(ConfigError, match="unknown environment variable PILLION_REDIS_PORT"):
        check_variables({"PILLION_REDIS_PORT": "6379"})


def test_every_variable_that_the_code_names_is_known() -> None:
    root = pathlib.Path(__file__).resolve().parents[3]
    packages = ("pillion", "gateway", "prefill_service", "decode_service", "engine", "kvstore", "kernels", "lab")
    text = "".join(path.read_text() for package in packages for path in (root / package).rglob("*.py"))
    named = set(re.findall(r"\bPILLION_[A-Z_]*[A-Z]\b", text))
    assert named <= {*map(env_name, known_names()), *OTHER_VARIABLES}


@pytest.mark.parametrize("role", [*COMPONENTS, "serve", "prepare"])
def test_an_unknown_key_is_rejected_by_name(tmp_path: pathlib.Path, role: str) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text("max-num-seq = 8\n")
    with pytest.raises(ConfigError, match=r"unknown key 'max-num-seq'; did you mean max-num-seqs\?"):
        CliRunner().invoke(cli, [role, "--config", str(file)], standalone_mode=False, catch_exceptions=False)
