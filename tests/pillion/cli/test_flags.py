"""Flags: one dataclass, three ways to fill it, one order of precedence, and the conversion back to an argv."""

from __future__ import annotations

import pathlib
import re
from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pillion.cli.app import cli, takes_model, with_model
from pillion.cli.flags import (
    ALL_FLAGS,
    GONE,
    GONE_SWITCHES,
    FlagCommand,
    check_variables,
    env_name,
    flag_options,
    known_names,
    option_name,
    read_config,
    subset,
    to_argv,
    without_flags,
)
from pillion.cli.help_groups import COMMANDS, GROUPS, OPTIONS, group_of
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, ModelFlags, ServeFlags
from pillion.errors import ConfigError
from tests.support.drafts import speculative


def parse(cls: type, argv: list[str], env: dict[str, str] | None = None) -> Any:
    """Return the flags of ``argv`` and ``env``, or the ClickException."""
    made: list[Any] = []

    @click.command()
    @flag_options(cls)
    def command(**values: Any) -> None:
        made.append(cls(**values))

    clean = {env_name(f.name): None for f in fields(cls)} | {"PILLION_CONFIG": None}
    result = CliRunner().invoke(command, argv, env={**clean, **(env or {})}, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return made[0]


@pytest.mark.parametrize("spelling", ["max-num-seqs", "max_num_seqs"])
def test_command_line_then_environment_then_file_then_default(tmp_path: pathlib.Path, spelling: str) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text(f"{spelling} = 3\n")
    from_file, from_env = ["--config", str(file)], {"PILLION_MAX_NUM_SEQS": "2"}
    assert parse(DecodeFlags, []).max_num_seqs == 64
    assert parse(DecodeFlags, from_file).max_num_seqs == 3
    assert parse(DecodeFlags, from_file, from_env).max_num_seqs == 2
    assert parse(DecodeFlags, [*from_file, "--max-num-seqs", "1"], from_env).max_num_seqs == 1
    assert parse(DecodeFlags, ["--max-num-seqs", "1", *from_file], from_env).max_num_seqs == 1


def test_the_file_may_be_named_by_the_environment(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text('kv-pool-bytes = "2GiB"\nprefill-workers = 4\nmodel = "folder"\n')
    flags = parse(ServeFlags, [], {"PILLION_CONFIG": str(file)})
    assert (flags.kv_pool_bytes, flags.prefill_workers, flags.model) == (2 * 2**30, 4, "folder")


def test_repeatable_flags(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text('also-model = ["a=/a", "b=/b"]\n')
    assert parse(ServeFlags, ["--config", str(file)]).also_model == ("a=/a", "b=/b")
    assert parse(ServeFlags, [], {"PILLION_ALSO_MODEL": "a=/a b=/b"}).also_model == ("a=/a", "b=/b")
    assert parse(ServeFlags, ["--also-model", "a=/a", "--also-model=b=/b"]).also_model == ("a=/a", "b=/b")
    assert parse(ServeFlags, []).also_model == ()


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        ("here --served-model-name a b --http-port 3", "here", ("a", "b")),
        ("here --served-model-name=a b", "here", ("a", "b")),
        ("--model here --served-model-name a b", "here", ("a", "b")),
        ("--served-model-name a b --model=here", "here", ("a", "b")),
        ("--served-model-name a here", "here", ("a",)),
        ("--served-model-name a --http-port 3 here", "here", ("a",)),
    ],
)
def test_a_repeatable_flag_accepts_several_words_like_vllm(argv: str, model: str, names: tuple[str, ...]) -> None:
    made: list[Any] = []

    @click.command(cls=FlagCommand)
    @takes_model
    @flag_options(GatewayFlags)
    def command(**values: Any) -> None:
        made.append(with_model(GatewayFlags, values))

    clean = {env_name(f.name): None for f in fields(GatewayFlags)} | {"PILLION_CONFIG": None}
    result = CliRunner().invoke(command, argv.split(), env=clean, standalone_mode=False)
    assert result.exception is None
    assert (made[0].model, made[0].served_model_name) == (model, names)


def test_a_word_too_many_is_an_error() -> None:
    for argv in (["serve", "demo", "more"], ["serve", "demo", "--http-port", "3", "more"]):
        result = CliRunner().invoke(cli, argv)
        assert (result.exit_code, "unexpected extra argument" in result.output) == (2, True), (argv, result.output)


def test_the_http_port_also_has_vllms_name(tmp_path: pathlib.Path) -> None:
    """But not in the environment, where Kubernetes sets PILLION_PORT for a service called pillion."""
    file = tmp_path / "pillion.toml"
    file.write_text("port = 9001\n")
    assert parse(ServeFlags, ["--port", "9000"]).http_port == 9000
    assert parse(GatewayFlags, ["--config", str(file)]).http_port == 9001
    kubernetes = {"PILLION_SERVICE_HOST": "10.0.0.1", "PILLION_PORT": "tcp://10.0.0.1:80"}
    assert parse(GatewayFlags, [], kubernetes).http_port == 8000
    file.write_text("port = 9001\nhttp-port = 9002\n")
    with pytest.raises(ConfigError, match="'http-port' occurs twice"):
        read_config(str(file))


def test_names_and_keys_are_read_from_every_source(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text('served-model-name = "one"\n[default-chat-template-kwargs]\nenable_thinking = false\n')
    flags = parse(GatewayFlags, ["--config", str(file)], {"PILLION_API_KEY": "key-a key-b"})
    assert (flags.served_model_name, flags.api_key) == (("one",), ("key-a", "key-b"))
    assert flags.default_chat_template_kwargs == '{"enable_thinking": false}'
    assert parse(GatewayFlags, ["--served-model-name=a", "--served-model-name=b"]).served_model_name == ("a", "b")
    assert GatewayFlags(served_model_name="a").served_model_name == ("a",)  # type: ignore[arg-type]
    assert parse(GatewayFlags, ["--root-path", "/a/b/"]).root_path == "/a/b"
    wrong = ("--api-key=", "--api-key=a b", "--api-key=\u00e9", "--root-path=a", "--root-path=/a?b", "--root-path=/<b>")
    for word in (*wrong, "--default-chat-template-kwargs=[1]", "--default-chat-template-kwargs={"):
        with pytest.raises(click.BadParameter) as caught:
            parse(GatewayFlags, [word])
        assert word.partition("=")[0] in caught.value.format_message()


def test_an_empty_variable_is_ignored() -> None:
    assert parse(DecodeFlags, [], {"PILLION_DTYPE": "", "PILLION_MAX_NUM_SEQS": ""}) == DecodeFlags()


def test_one_file_may_serve_all_components(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text("http-port = 1\nmax-num-seqs = 5\n")
    assert parse(DecodeFlags, ["--config", str(file)]).max_num_seqs == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max-num-sequences = 1", "unknown key 'max-num-sequences'"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "occurs twice"),
        ("max-num-seqs = [1]", "must be a string or a number"),
        ("[decode]\nmax-num-seqs = 1", "unknown key 'decode'"),
        ("max-num-seqs", "config file"),
        ('also-model = "a=b"', "must be a list of strings"),
        ("also-model = [1]", "must be a list of strings"),
    ],
)
def test_a_broken_file_is_a_one_line_error(tmp_path: pathlib.Path, text: str, complaint: str) -> None:
    file = tmp_path / "pillion.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_config(str(file))
    assert "\n" not in caught.value.message


def test_a_missing_file_is_a_one_line_error() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config("/nowhere/pillion.toml")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--max-num-seqs", "many"], "'many' is not a valid integer"),
        (["--max-model-len", "8X"], "is not a size"),
        (["--dtype", "int8"], "'int8' is not one of auto, bfloat16, "),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_a_bad_value_is_a_usage_error(argv: list[str], complaint: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(DecodeFlags, argv)
    assert complaint in caught.value.format_message()
    assert "\n" not in caught.value.format_message()


def test_a_removed_flag_is_accepted_with_a_warning(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("max-message-bytes = 1")
    variable = env_name("max_message_bytes")
    check_variables({variable: "1"})
    twice = ["--max-message-bytes=1", "--max-message-bytes=2"]
    sources = ((twice, {}), ([], {variable: "1"}), ([f"--config={file}"], {}))

    @click.command()
    @flag_options(GatewayFlags)
    def command(**values: Any) -> None:
        assert GatewayFlags(**values)

    for argv, env in sources:
        result = CliRunner().invoke(command, argv, env={"PILLION_CONFIG": None, **env})
        assert (result.exit_code, result.stderr.count("--max-message-bytes has no effect")) == (0, 1), result.output
    assert "message-bytes" not in CliRunner().invoke(command, ["--help"]).output


def test_a_removed_flag_value_is_accepted_by_its_commands(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("max-waiting-tickets = 8")

    def output(flags: type, argv: list[str]) -> str:
        @click.command()
        @flag_options(flags)
        def command(**values: Any) -> None:
            assert flags(**values)

        result = CliRunner().invoke(command, argv, env={"PILLION_CONFIG": None})
        assert result.exit_code == 0, result.output
        return result.stderr

    for argv in (["--max-waiting-tickets=8"], [f"--config={file}"]):
        assert output(KVNodeFlags, argv).count("--max-waiting-tickets has no effect") == 1
    assert output(GatewayFlags, [f"--config={file}"]) == ""


@pytest.mark.parametrize("name", GONE)
def test_each_removed_flag_names_its_replacement(name: str) -> None:
    owner, about = GONE[name]
    if not issubclass(ServeFlags, owner):
        pytest.skip("a flag of another command")

    @click.command()
    @flag_options(ServeFlags)
    def command(**values: Any) -> None:
        assert name not in values

    argv = [option_name(name)] if name in GONE_SWITCHES else [f"{option_name(name)}=1"]
    result = CliRunner().invoke(command, argv, env={"PILLION_CONFIG": None})
    assert result.exit_code == 0, result.output
    assert f"{option_name(name)} has no effect and will be removed in the next release: {about}" in result.stderr


def test_a_removed_switch_is_accepted_without_a_value(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.toml"
    file.write_text("vllm-metric-names = false")
    variable = {env_name("vllm_metric_names"): "false"}
    sources = ((["--vllm-metric-names"], {}), (["--no-vllm-metric-names"], {}), ([f"--config={file}"], {}))

    @click.command()
    @flag_options(KVNodeFlags)
    def command(**values: Any) -> None:
        assert KVNodeFlags(**values)

    for argv, env in (*sources, ([], variable)):
        result = CliRunner().invoke(command, argv, env={"PILLION_CONFIG": None, **env})
        assert (result.exit_code, result.stderr.count("--vllm-metric-names has no effect")) == (0, 1), result.output
    assert CliRunner().invoke(command, [], env={"PILLION_CONFIG": None}).stderr == ""


def value_of(field: Any) -> st.SearchStrategy[Any]:
    if field.metadata["secret"]:
        # A child gets it by the environment.
        return st.just(field.default)
    if isinstance(field.default, tuple):
        one = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
        return st.lists(one, min_size=len(field.default), max_size=3).map(tuple)
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"])
    if field.name == "target_itl_ms":
        return st.one_of(st.just("auto"), st.floats(0, 1e9))
    if field.name == "speculative_config":
        return st.sampled_from([speculative(0), speculative(3), speculative(5, "suffix")])
    if field.name == "root_path":
        return st.sampled_from(["", "/a", "/a/b-1"])
    if field.name == "default_chat_template_kwargs":
        return st.sampled_from(["", '{"enable_thinking": false}'])
    if field.name == "override_generation_config":
        return st.sampled_from(["", '{"temperature": 0.6, "top_k": 20}', '{"max_new_tokens": 5}'])
    if isinstance(field.default, str):
        return st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
    if isinstance(field.default, bool):
        return st.booleans()
    if isinstance(field.default, float):
        return st.floats(0, 1e9)
    # Beyond 2**53 a size is no longer exact.
    return st.integers(0, 2**53)


@pytest.mark.parametrize("cls", ALL_FLAGS, ids=lambda cls: cls.__name__)
def test_flags_survive_a_round_trip_through_argv(cls: Any) -> None:
    @given(st.builds(cls, **{field.name: value_of(field) for field in fields(cls)}))
    def check(flags: Any) -> None:
        # The environment must not matter to a child that gets every flag on its command line.
        hostile = {env_name("block_size"): "7", env_name("log_level"): "debug"}
        assert parse(cls, to_argv(flags), hostile) == flags

    check()


def test_a_target_is_a_number_or_auto() -> None:
    assert DecodeFlags().target_itl_ms == "auto"
    for text, value in (("auto", "auto"), ("0", 0.0), ("12.5", 12.5)):
        assert parse(DecodeFlags, [f"--target-itl-ms={text}"]).target_itl_ms == value
    for text in ("", "-1", "nan", "inf", "fast"):
        with pytest.raises(click.BadParameter, match="--target-itl-ms"):
            parse(DecodeFlags, [f"--target-itl-ms={text}"])


def test_every_flag_has_one_name_everywhere() -> None:
    assert option_name("max_num_seqs") == "--max-num-seqs"
    assert env_name("max_num_seqs") == "PILLION_MAX_NUM_SEQS"
    for cls in ALL_FLAGS:
        for field in fields(cls):
            assert field.metadata["help"].endswith((".", ")")), field.name


@pytest.mark.parametrize("cls", ALL_FLAGS)
def test_every_number_has_limits(cls: Any) -> None:
    """A negative one is rejected by name unless it is documented to have a meaning."""
    unbounded = [field.name for field in fields(cls) if type(field.default) in (int, float)]
    assert [name for name in unbounded if cls.__dataclass_fields__[name].metadata["minimum"] is None] == []


def test_children_do_not_inherit_the_parents_variables() -> None:
    environ = {"PILLION_MAX_NUM_SEQS": "1", "PILLION_CONFIG": "x", "PILLION_CACHE": "kept", "HOME": "kept"}
    assert without_flags(environ) == {"PILLION_CACHE": "kept", "HOME": "kept"}


def test_a_component_gets_the_flags_it_shares() -> None:
    flags = subset(GatewayFlags, ServeFlags(chunk_size=64, model="m", log_level="info"), http_port=1)
    assert flags == GatewayFlags(chunk_size=64, model="m", http_port=1)
    assert subset(ModelFlags, flags) == ModelFlags(model="m")


@pytest.mark.parametrize("command", [["status"], ["keys", "hash"], ["bench", "run"], ["version"], ["kvnode"]])
def test_every_command_rejects_unused_variables(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLION_HTTP_PRT", "1")
    with pytest.raises(ConfigError, match=r"variable PILLION_HTTP_PRT; did you mean PILLION_HTTP_PORT?"):
        cli.main(command, standalone_mode=False)


def test_an_invalid_value_names_its_source(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pillion.toml").write_text('\nmax-num-seqs = "many"\n')
    with pytest.raises(click.BadParameter, match=r"set by line 2 of .*pillion.toml"):
        cli.main(["serve", "--config", str(tmp_path / "pillion.toml")], standalone_mode=False)
    monkeypatch.setenv("PILLION_MAX_NUM_SEQS", "many")
    with pytest.raises(click.BadParameter, match="set by PILLION_MAX_NUM_SEQS") as caught:
        cli.main(["serve"], standalone_mode=False)
    assert caught.value.format_message().startswith("Invalid value for '--max-num-seqs': 'many' is not")


@pytest.mark.parametrize("command", ["serve", "gateway", "prefill", "decode", "kvnode", "prepare"])
def test_the_help_has_each_flag_once_in_a_group(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"], terminal_width=200).output
    options = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", shown, re.MULTILINE)
    names = [
        param.opts[0] for param in cli.commands[command].params if isinstance(param, click.Option) and not param.hidden
    ]
    assert sorted(options) == sorted([*names, "--help"])
    titles = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert titles == [title for title in (OPTIONS, *GROUPS) if title in titles], "a flag has no group"
    assert max(shown.index(f"\n{title}:") for title in titles) < len(shown)


def test_every_command_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in COMMANDS.values() for name in names.split()]
    assert sorted(grouped) == sorted(cli.commands)
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert re.findall(r"^([A-Z][a-z ]+):$", shown, re.MULTILINE) == ["Options", *COMMANDS]
    for name in grouped:
        (line,) = re.findall(rf"^  {name} +(\S.*)$", shown, re.MULTILINE)
        assert line.endswith(".")
        assert not line.endswith("...")
    assert max(map(len, shown.splitlines())) <= 80


def test_groups_name_flags_that_exist() -> None:
    beginnings = {"_".join(name.split("_")[:n]) for name in known_names() for n in range(1, 9)}
    assert {name for names in GROUPS.values() for name in names.split()} <= beginnings
    assert (group_of("cpu_threads"), group_of("kv_device"), group_of("nothing")) == ("Processes", "KV cache", "Others")
