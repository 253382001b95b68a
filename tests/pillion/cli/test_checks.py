"""Addresses, certificates, keys and numbers that cannot or should not work are refused before anything starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pillion.cli.checks import check_flags
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.net.addresses import is_local

OPEN = ("0.0.0.0:1", "10.0.0.7:1", "[::]:1", "kvnode:1", "example.org:1", ":1", "[fe80::1]:1")
LOCAL = ("127.0.0.1:1", "127.8.8.8:0", "[::1]:1", "localhost:1", "unix:/run/x.sock")
PROVEN = {"internal_tls_cert": "c", "internal_tls_key": "k", "internal_tls_ca": "a"}


@pytest.mark.parametrize("address", OPEN)
@pytest.mark.parametrize(
    ("cls", "name"), [(KVNodeFlags, "node_listen"), (PrefillFlags, "listen"), (DecodeFlags, "listen")]
)
def test_a_component_listens_publicly_only_on_request(cls: Any, name: str, address: str) -> None:
    assert not is_local(address)
    with pytest.raises(ConfigError, match="--insecure-internal") as caught:
        check_flags(cls(**{name: address}))
    assert f"--{name.replace('_', '-')} {address}" in caught.value.message
    assert "\n" not in caught.value.message
    check_flags(cls(**{name: address}, insecure_internal=True))
    check_flags(cls(**{name: address}, **PROVEN))


@pytest.mark.parametrize("address", LOCAL)
def test_local_addresses_need_no_tls(address: str) -> None:
    assert is_local(address)
    check_flags(KVNodeFlags(node_listen=address))
    check_flags(DecodeFlags(listen=address))


@pytest.mark.parametrize("missing", list(PROVEN))
@pytest.mark.parametrize("cls", [KVNodeFlags, DecodeFlags, GatewayFlags, ServeFlags])
def test_internal_tls_needs_certificate_key_and_ca(cls: Any, missing: str) -> None:
    with pytest.raises(ConfigError, match="must be given together"):
        check_flags(cls(**{**PROVEN, missing: ""}))


@pytest.mark.parametrize(
    "flags", [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_ca": "a"}, {"tls_cert": "c", "tls_ca": "a"}]
)
def test_public_tls_needs_a_certificate_and_its_key(flags: dict[str, str]) -> None:
    for cls in (GatewayFlags, ServeFlags):
        with pytest.raises(ConfigError):
            check_flags(cls(**flags))
        check_flags(cls(tls_cert="c", tls_key="k", tls_ca="a"))


@pytest.mark.parametrize("cls", [KVNodeFlags, PrefillFlags, DecodeFlags, GatewayFlags, ServeFlags])
def test_default_flags_are_valid(cls: Any) -> None:
    check_flags(cls())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            GatewayFlags(allowed_origins=("chat.example.org",)),
            "--allowed-origins: 'chat.example.org' is not '*' or like",
        ),
        (ServeFlags(allowed_origins=('["https://a.org/b"]',)), "--allowed-origins: 'https://a.org/b' is not"),
        (ServeFlags(allowed_origins=("[5]",)), "--allowed-origins: 5 is not"),
        (GatewayFlags(ui=True, host="0.0.0.0"), "--ui at 0.0.0.0 needs --api-keys"),
        (ServeFlags(ui=True, host="::"), "--ui at :: needs --api-keys"),
        (
            ServeFlags(enable_lora=True, allow_runtime_lora_updating=True, lora_path=("a",), host="10.0.0.7"),
            "--allow-runtime-lora-updating needs --api-keys",
        ),
        (ServeFlags(block_size=0), "--block-size 0 is less than 1"),
        (ServeFlags(chunk_size=100), "--chunk-size 100 is not a multiple of --block-size 16"),
        (ServeFlags(split_policy="half"), "is not auto, disaggregated, colocated or fraction:x"),
        (ServeFlags(split_policy="fraction:1.5"), "write fraction:x with x from 0 to 1"),
        (ServeFlags(split_policy="fraction:nan"), "write fraction:x"),
        (ServeFlags(prefill_workers=0, split_policy="disaggregated"), "needs --split-policy colocated or auto"),
        (ServeFlags(decode_workers=0), "--decode-workers 0 is less than 1"),
        (ServeFlags(http_port=70000), "--http-port 70000 is more than 65535"),
        (ServeFlags(max_num_seqs=512, max_num_batched_tokens=256), "must be at least --max-num-seqs"),
        (ServeFlags(heartbeat_ms=5000), "must be longer"),
        (DecodeFlags(max_num_seqs=-1), "--max-num-seqs -1 is less than 1"),
        (PrefillFlags(max_num_batched_prefill_tokens=8), "smaller than one block"),
        (KVNodeFlags(gpu_memory_utilization=1.5), "more than 1"),
        (KVNodeFlags(metrics_port=-1), "--metrics-port -1 is less than 0"),
        (KVNodeFlags(disk_bytes=-1), "--disk-bytes -1 is less than 0"),
        # What the components alone refused, when all others ran already.
        (ServeFlags(lora_modules=("a=b",)), "--lora-modules needs --enable-lora"),
        (ServeFlags(lora_path=("a",)), "--lora-path needs --enable-lora"),
        (ServeFlags(enable_lora=True, lora_path=("a",)), "--allow-runtime-lora-updating and --lora-path"),
        (ServeFlags(http_port=9000, grpc_port=9000), "--http-port and --grpc-port are both 9000"),
        (GatewayFlags(gateway_workers=2), "--gateway-workers is a flag of pillion serve"),
    ],
)
def test_invalid_flag_combinations_are_rejected(flags: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        check_flags(flags)
    assert "\n" not in caught.value.message


def test_colocated_needs_no_prefill_worker() -> None:
    check_flags(ServeFlags(prefill_workers=0, split_policy="colocated"))
    check_flags(ServeFlags(prefill_workers=0))


def test_open_apis_are_allowed_with_keys_or_on_loopback() -> None:
    open_apis = {"ui": True, "enable_lora": True, "allow_runtime_lora_updating": True, "lora_path": ("a",)}
    check_flags(ServeFlags(host="0.0.0.0", api_keys="keys.toml", **open_apis))
    check_flags(ServeFlags(host="127.0.0.1", **open_apis))
    check_flags(ServeFlags(host="0.0.0.0"))


def test_a_fraction_may_be_a_quotient() -> None:
    check_flags(ServeFlags(split_policy="fraction:1/3"))
