"""`pillion keys`: what it writes, what it refuses."""

from __future__ import annotations

import pathlib
import stat

import pytest
from click.testing import CliRunner

from pillion.cli.app import cli
from pillion.cli.keys import add_key
from pillion.errors import ConfigError
from pillion.gateway.admission.api_keys import hash_of, read_keys


def test_keys_are_added_to_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    result = CliRunner().invoke(cli, ["keys", "add", str(path), "--tenant", "acme"])
    assert result.exit_code == 0, result.output
    keys = [result.output.strip(), add_key(path, "acme"), add_key(path, "new.one")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(key in path.read_text() for key in keys)
    ring = read_keys(str(path))
    assert [ring.tenant_of(f"Bearer {key}").name for key in keys] == ["acme", "acme", "new.one"]
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_what_was_there_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n[tenant.acme]\nweight = 3 # much\n")
    key = add_key(path, "acme")
    assert "# ours" in path.read_text()
    assert read_keys(str(path)).tenant_of(f"Bearer {key}").weight == 3.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenant.ops]\n",
        "[ tenant . 'ops' ] # us\nweight = 3\noperator = false\n[tenant.opsy]\noperator = false\n",
        '[[key]]\ntenant = "ops"\nid = "x"\nhash = "sha256:'
        + "0" * 64
        + '"\n[tenant."ops"]\nweight=3\n# no operator\n',
        "[tenant.ops]\noperator = true\n",
    ],
)
def test_a_key_of_an_operator(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    if text:
        path.write_text(text)
    result = CliRunner().invoke(cli, ["keys", "add", str(path), "--tenant", "ops", "--operator"])
    assert result.exit_code == 0, result.output
    ring = read_keys(str(path))
    assert ring.tenant_of(f"Bearer {result.output.strip()}").operator
    assert [name for name, tenant in ring.tenants.items() if tenant.operator] == ["ops"]
    assert {line for line in text.splitlines() if "operator" not in line} <= set(path.read_text().splitlines())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenant.acme]\nweight = 3\n",
        '[tenant.acme]\nmodels = ["demo"] # theirs\nweight = 3\n[tenant.other]\nmodels = ["demo"]\n',
        '[tenant.acme]\nmodels = [\n  "demo",\n  "sql",\n]\nweight = 3\n',
    ],
)
def test_a_tenant_is_limited_to_models(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    if text:
        path.write_text(text)
    add = ["keys", "add", str(path), "--tenant", "acme"]
    result = CliRunner().invoke(cli, [*add, "--models", "sql", "--models", "größe"])
    assert result.exit_code == 0, result.output
    ring = read_keys(str(path))
    tenant = ring.tenant_of(f"Bearer {result.output.strip()}")
    assert (tenant.models, tenant.weight) == (("sql", "größe"), 3.0 if text else 1.0)
    assert [other.models for name, other in ring.tenants.items() if name != "acme"] in ([], [("demo",)])
    # Another key leaves that as it is.
    assert CliRunner().invoke(cli, add).exit_code == 0
    assert read_keys(str(path)).tenants["acme"].models == ("sql", "größe")


def test_a_table_that_is_not_found_is_named(tmp_path: pathlib.Path) -> None:
    path, text = tmp_path / "keys.toml", "tenant = {ops = {weight = 2}}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"write operator = true into \[tenant.ops\] by hand"):
        add_key(path, "ops", operator=True)
    assert path.read_text() == text


@pytest.mark.parametrize(("text", "tenant"), [("[tenant", "acme"), ("", "a b"), ("", 'x"]'), ("", ""), ("", "-x")])
def test_a_bad_file_or_name_changes_nothing(tmp_path: pathlib.Path, text: str, tenant: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        add_key(path, tenant)
    assert path.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_the_hash_of_a_key_that_exists() -> None:
    key = "k" * 40
    result = CliRunner().invoke(cli, ["keys", "hash"], input=f"{key}\n")
    assert result.output.strip() == hash_of(key)
    assert CliRunner().invoke(cli, ["keys", "hash"], input="short\n").exit_code != 0
