"""`pillion keys`: what it writes, what it refuses."""

from __future__ import annotations

import pathlib
import stat
from typing import Any

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


def test_adding_a_key_preserves_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("# ours\n[tenant.acme]\nweight = 3 # much\n")
    key = add_key(path, "acme")
    assert "# ours" in path.read_text()
    assert read_keys(str(path)).tenant_of(f"Bearer {key}").weight == 3.0


@pytest.mark.parametrize("text", ["", "[tenant.other]\nweight = 3\n", "[tenant.ops]\noperator = true\n"])
def test_a_key_of_an_operator(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    if text:
        path.write_text(text)
    result = CliRunner().invoke(cli, ["keys", "add", str(path), "--tenant", "ops", "--operator"])
    assert result.exit_code == 0, result.output
    ring = read_keys(str(path))
    assert ring.tenant_of(f"Bearer {result.output.strip()}").operator
    assert [name for name, tenant in ring.tenants.items() if tenant.operator] == ["ops"]
    assert set(text.splitlines()) <= set(path.read_text().splitlines())


def test_a_new_tenant_is_limited_to_models(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.toml"
    add = ["keys", "add", str(path), "--tenant", "acme"]
    # The second and the third key leave the tenant as it is.
    for more in (["--models", "sql", "--models", "größe"], ["--models", "sql", "--models", "größe"], []):
        result = CliRunner().invoke(cli, [*add, *more])
        assert result.exit_code == 0, result.output
        assert read_keys(str(path)).tenant_of(f"Bearer {result.output.strip()}").models == ("sql", "größe")


@pytest.mark.parametrize(
    ("asked", "line"), [({"operator": True}, "operator = true"), ({"models": ("sql",)}, r'models = \["sql"\]')]
)
def test_limits_of_an_existing_tenant_are_not_changed(tmp_path: pathlib.Path, asked: dict[str, Any], line: str) -> None:
    path, text = tmp_path / "keys.toml", "[tenant.ops]\nweight = 2\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"already has \[tenant.ops\]: add {line} to it by hand"):
        add_key(path, "ops", **asked)
    assert path.read_text() == text


@pytest.mark.parametrize(("text", "tenant"), [("[tenant", "acme"), ("", "a b"), ("", 'x"]'), ("", ""), ("", "-x")])
def test_a_bad_file_or_name_changes_nothing(tmp_path: pathlib.Path, text: str, tenant: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        add_key(path, tenant)
    assert path.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_keys_hash_prints_the_hash_of_an_existing_key() -> None:
    key = "k" * 40
    result = CliRunner().invoke(cli, ["keys", "hash"], input=f"{key}\n")
    assert result.output.strip() == hash_of(key)
    assert CliRunner().invoke(cli, ["keys", "hash"], input="short\n").exit_code != 0
