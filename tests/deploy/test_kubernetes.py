"""The Helm chart: rendered by Helm, checked by Kubernetes' schemas, and held to docs/kubernetes.md."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="Helm's library has no wheel for this machine")

from helm_python import HelmError
from jsonschema import ValidationError as SchemaError
from kubernetes_validate import ValidationError

from pillion.cli.flags import ALL_FLAGS, env_name, known_names
from tests.support.charts import (
    CHART,
    CUSTOM,
    Manifest,
    check_restricted,
    check_schema,
    containers,
    environment,
    lint,
    of_kind,
    pod_of,
    render,
)
from tests.support.compose import ROOT, read_services

SCALED = {"enabled": True}
BOTH = {"prefill": None, "decode": None, "both": {"prefill": 2, "decode": 2, "kvPoolBytes": "16GiB"}}
SECURED = {
    "internalTls": {"existingSecret": "internal"},
    "redis": {"existingSecret": "redis"},
    "gateway": {
        "tls": {"existingSecret": "edge", "clientCertificates": True},
        "apiKeys": {"existingSecret": "keys"},
        "batches": {"existingClaim": "batches"},
        "records": {"existingSecret": "records"},
        "allowFrom": [{"namespaceSelector": {}}],
    },
}
WATCHED = {
    "metrics": {"podMonitor": {"enabled": True}, "allowFrom": [{"namespaceSelector": {}}]},
    "tracing": {"endpoint": "http://collector:4317"},
    "pools": {
        "prefill": {"autoscaling": SCALED},
        "decode": {"autoscaling": {**SCALED, "itlP99Ms": 100}},
    },
    "model": {"name": "/models/x", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
}
CASES: dict[str, dict[str, Any]] = {"default": {}, "both": {"pools": BOTH}, "secured": SECURED, "watched": WATCHED}


@pytest.fixture(params=CASES, scope="module")
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(CASES[request.param])


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield pod_of(manifest)


def test_the_chart_passes_helm_lint() -> None:
    assert lint() == ()


def test_manifests_match_their_schemas(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check_schema(manifest)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))


def test_the_charts_choices_match_those_of_the_flags() -> None:
    flags = {field.name: field.metadata["choices"] for cls in ALL_FLAGS for field in fields(cls)}
    schema = json.loads((ROOT / "deploy" / "helm" / "pillion" / "values.schema.json").read_text())
    compared = 0
    for name, value in schema["properties"]["model"]["properties"].items():
        choices = flags.get(re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name))
        if choices:
            assert [str(each) for each in value.get("enum", ())] == list(choices), name
            compared += 1
    assert compared == 6


def test_the_manifest_schema_check_finds_a_wrong_field() -> None:
    manifests = render(WATCHED)
    deployment = of_kind(manifests, "Deployment", "gateway")
    deployment["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(ValidationError, match="terminationGracePeriodSecond"):
        check_schema(deployment)
    scaled = of_kind(manifests, "ScaledObject", "decode")
    scaled["spec"]["triggers"][0]["metadata"]["treshold"] = "1"
    with pytest.raises(SchemaError, match="treshold"):
        check_schema(scaled)
    assert {manifest["kind"] for manifest in manifests} >= CUSTOM.keys()


def test_pods_are_restricted(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        check_restricted(pod)


def test_user_ids_are_configurable_and_omitted_on_openshift(tmp_path: pathlib.Path) -> None:
    """Helm's library renders without a cluster, so in a copy of the chart a group of APIs that each cluster has stands
    for OpenShift's."""
    ids = {"runAsUser", "runAsGroup", "fsGroup"}
    mine = {"podSecurity": {"runAsUser": 1234, "fsGroup": None}, "redis": {"podSecurity": {"runAsUser": None}}}
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    helpers = copy / "templates" / "_helpers.tpl"
    helpers.write_text(helpers.read_text().replace('"security.openshift.io/v1"', '"apps/v1"'))
    for values, folder, expected, of_redis in (
        (
            {},
            CHART,
            {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
            {"runAsUser": 999, "runAsGroup": 1000},
        ),
        (mine, CHART, {"runAsUser": 1234, "runAsGroup": 10001}, {"runAsGroup": 1000}),
        (mine, copy, {}, {}),
    ):
        for pod in pods(render(values, folder=folder)):
            check_restricted(pod)
            context = pod["securityContext"]
            found = {name: value for name, value in context.items() if name in ids}
            assert found == (of_redis if pod["containers"][0]["name"] == "redis" else expected)


def test_components_listen_on_ipv4_and_ipv6(manifests: list[Manifest]) -> None:
    found = [
        (name, value)
        for pod in pods(manifests)
        for container in containers(pod)
        for name, value in environment(container).items()
        if name in ("PILLION_HOST", "PILLION_METRICS_HOST", "PILLION_LISTEN", "PILLION_NODE_LISTEN")
    ]
    assert {name for name, _ in found} >= {"PILLION_HOST", "PILLION_METRICS_HOST", "PILLION_LISTEN"}
    assert all(value == "::" or value.startswith("[::]:") for _, value in found), found
    assert "0.0.0.0" not in json.dumps(manifests)


def test_every_environment_variable_is_a_flag(manifests: list[Manifest]) -> None:
    flags = {env_name(name) for name in known_names()}
    for container in [container for pod in pods(manifests) for container in containers(pod)]:
        assert {name for name in environment(container) if name.startswith("PILLION_")} <= flags, container["name"]
    for service in read_services({}).values():
        assert {name for name in service.environment if name.startswith("PILLION_")} <= flags, service.name


def test_ports_are_unique_and_opened_by_policies(manifests: list[Manifest]) -> None:
    """Ports are unique in a pod, and the policies open exactly these, to the right pods."""
    policies = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "NetworkPolicy"}
    for manifest in manifests:
        if manifest["kind"] != "Deployment":
            continue
        ports = [port for container in containers(pod_of(manifest)) for port in container.get("ports", ())]
        for key in ("containerPort", "name"):
            assert len({port[key] for port in ports}) == len(ports)
        gateway = manifest["metadata"]["name"].endswith("-gateway")
        rules = policies["rel-gateway" if gateway else "rel-workers"]["spec"]["ingress"]
        inside, metrics = (
            {port for one in rule["ports"] for port in range(one["port"], one.get("endPort", one["port"]) + 1)}
            for rule in rules
        )
        for port in ports:
            assert port["containerPort"] in (metrics if port["name"].startswith("metrics") else inside), port
        if not gateway:
            assert rules[0]["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["gateway", "worker"]
    listening = {
        environment(container).get("PILLION_LISTEN", "").rpartition(":")[2]: container["ports"][0]["containerPort"]
        for pod in pods(manifests)
        for container in containers(pod)
        if "PILLION_LISTEN" in environment(container)
    }
    assert all(int(listen_port) == port for listen_port, port in listening.items())


def test_upgrades_keep_streams(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] != "Deployment":
            continue
        assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        pod = pod_of(manifest)
        drains = [float(environment(one).get("PILLION_DRAIN_TIMEOUT_S", 0)) for one in pod["containers"]]
        sleeps = [
            one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for one in pod["containers"]
        ]
        assert all(drains)
        assert pod["terminationGracePeriodSeconds"] > max(drains) + max(sleeps)
        for container in pod["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_the_node_stops_after_its_workers(manifests: list[Manifest]) -> None:
    for pod in pods(manifests):
        first = {one["name"]: one for one in pod.get("initContainers", ())}
        if "kvnode" not in first:
            continue
        node, keeper = first["kvnode"], first["keeper"]
        assert node["restartPolicy"] == keeper["restartPolicy"] == "Always", "sidecars: first started, last stopped"
        assert list(first) == ["prepare", "keeper", "kvnode"]
        assert keeper["args"] == ["keeper", environment(node)["PILLION_KEEPER_SOCKET"]]
        assert pod["shareProcessNamespace"], "on a GPU the node has to see that a worker's process has exited"
        env = environment(node)
        drains = [float(environment(worker)["PILLION_DRAIN_TIMEOUT_S"]) for worker in pod["containers"]]
        assert (
            pod["terminationGracePeriodSeconds"] > max(drains) + float(env["PILLION_HAND_OVER_TIMEOUT_S"]) > max(drains)
        )
        assert "metadata.name" in env["PILLION_NODE_ID"], "two pods are two nodes"
        folder = env["PILLION_ATTACH_SOCKET"].rpartition("/")[0].rpartition("/")[0]
        names = [environment(worker)["PILLION_COMPONENT_ID"] for worker in pod["containers"]]
        assert len(set(names)) == len(names)
        for container in (node, *pod["containers"]):
            assert environment(container)["PILLION_ATTACH_SOCKET"] == env["PILLION_ATTACH_SOCKET"]
        for container in (keeper, node, *pod["containers"]):
            assert {"name": "attach", "mountPath": folder} in container["volumeMounts"]
        assert [one["args"] for one in pod["containers"]] == [[one["name"].split("-")[0]] for one in pod["containers"]]


def test_a_pool_renders_its_containers() -> None:
    pod = pod_of(of_kind(render({"pools": BOTH}), "Deployment", "both"))
    assert [one["name"] for one in pod["containers"]] == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    split = render()
    assert [one["name"] for one in pod_of(of_kind(split, "Deployment", "-prefill"))["containers"]] == ["prefill-0"]
    assert [one["name"] for one in pod_of(of_kind(split, "Deployment", "-decode"))["containers"]] == ["decode-0"]


def test_kinds_of_pods_may_differ_in_ranks() -> None:
    rendered = render({"pools": {"prefill": {"prefill": 1, "tensorParallelSize": 4}}})
    for kind, size in (("-prefill", "4"), ("-decode", "1")):
        pod = pod_of(of_kind(rendered, "Deployment", kind))
        told = {
            container["name"]: environment(container).get("PILLION_TENSOR_PARALLEL_SIZE")
            for container in containers(pod)
        }
        assert told == {"prepare": size, "keeper": None, "kvnode": None, f"{kind[1:]}-0": size}


def test_prefill_workers_alone_have_stages() -> None:
    rendered = render({"pools": {"both": {"prefill": 1, "decode": 1, "pipelineParallelSize": 2}}})
    pod = pod_of(of_kind(rendered, "Deployment", "-both"))
    name = "PILLION_PIPELINE_PARALLEL_SIZE"
    told = {one["name"]: environment(one)[name] for one in containers(pod) if name in environment(one)}
    assert told == {"prefill-0": "2"}


def test_containers_share_their_quantization_settings() -> None:
    told = {"quantization": "int4", "quantizationGroupSize": 128, "kvCacheDtype": "int8"}
    wanted = {
        "PILLION_QUANTIZATION": "int4",
        "PILLION_QUANTIZATION_GROUP_SIZE": "128",
        "PILLION_KV_CACHE_DTYPE": "int8",
    }
    own = [
        container
        for pod in pods(render({"model": told}))
        for container in containers(pod)
        if "PILLION_MODEL" in environment(container)
    ]
    assert {"prepare", "kvnode", "gateway"} <= {container["name"] for container in own}
    for container in own:
        assert wanted.items() <= environment(container).items(), container["name"]


def asked(container: dict[str, Any]) -> None:
    """Check that a part is asked at its own metrics port, by the kubelet alone."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (("startupProbe", "/alive"), ("readinessProbe", "/health"), ("livenessProbe", "/alive")):
        page = container[probe]["httpGet"]
        assert page.keys() == {"path", "port"}
        assert (page["path"], ports[page["port"]]) == (path, int(environment(container)["PILLION_METRICS_PORT"]))


def test_secrets_are_mounted_as_files() -> None:
    manifests = render(SECURED)
    assert not any(one["kind"] in ("StatefulSet", "Secret") for one in manifests), "Redis is somebody else's"
    for pod in pods(manifests):
        for container in containers(pod):
            env = environment(container)
            if container["name"] == "keeper":
                assert not env, "it serves a Unix socket, and is told nothing"
                continue
            assert env["PILLION_INSECURE_INTERNAL"] == "false"
            paths = [env[name] for name in env if name.endswith(("_CERT", "_KEY", "_CA", "_KEYS"))]
            folders = {mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")}
            assert {path.rpartition("/")[0] for path in paths} <= folders
            if container["args"] not in (["prepare"], ["gateway"]):
                asked(container)
            if container["args"] != ["prepare"]:
                assert "secretKeyRef" in env["PILLION_REDIS_URL"]
    for tls in ({"existingSecret": "edge"}, {"existingSecret": "edge", "clientCertificates": True}):
        edge = pod_of(of_kind(render({"gateway": {"tls": tls}}), "Deployment", "gateway"))
        asked(edge["containers"][0])


def test_adapters_are_mounted_in_gateways_and_enabled_everywhere() -> None:
    modules, volume = ["sql=/adapters/sql", "b=/adapters/b"], {"persistentVolumeClaim": {"claimName": "mine"}}
    values = {"enabled": True, "maxLoras": 4, "modules": modules, "volume": volume}
    assert "PILLION_LORA_PATH" not in str(render({"adapters": values})), "a gateway refuses it without runtimeUpdating"
    keys = {"gateway": {"apiKeys": {"existingSecret": "keys"}}}
    manifests = render({"adapters": {**values, "runtimeUpdating": True}, **keys})
    for pod in pods(manifests):
        for container in containers(pod):
            told = environment(container)
            if container["args"] != ["prepare"] and "PILLION_MODEL" in told:
                assert (told["PILLION_ENABLE_LORA"], told["PILLION_MAX_LORAS"]) == ("true", "4")
    pod = pod_of(of_kind(manifests, "Deployment", "gateway"))
    told = environment(pod["containers"][0])
    assert told["PILLION_LORA_MODULES"].split() == modules
    assert told["PILLION_LORA_PATH"] == "/adapters"
    (name,) = [one["name"] for one in pod["containers"][0]["volumeMounts"] if one["mountPath"] == "/adapters"]
    assert next(one for one in pod["volumes"] if one["name"] == name)["persistentVolumeClaim"] == {"claimName": "mine"}
    assert "LORA" not in str(render())


def test_batches_are_stored_on_a_volume_claim() -> None:
    def gateway(values: dict[str, Any]) -> Any:
        return pod_of(of_kind(render(values), "Deployment", "gateway"))

    pod = gateway({"gateway": {"batches": {"existingClaim": "mine"}}})
    (container,) = pod["containers"]
    path = next(one["value"] for one in container["env"] if one["name"] == "PILLION_BATCH_PATH")
    (name,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]
    assert next(one for one in pod["volumes"] if one["name"] == name)["persistentVolumeClaim"] == {"claimName": "mine"}
    assert "PILLION_BATCH_PATH" not in str(gateway({}))


def test_gateways_share_the_key_that_signs_bundles_in_redis() -> None:
    pod = pod_of(of_kind(render({"gateway": {"records": {"existingSecret": "mine"}}}), "Deployment", "gateway"))
    (container,) = pod["containers"]
    told = environment(container)
    assert told["PILLION_RECORD_PATH"] == "redis"
    folder = told["PILLION_RECORD_KEY_FILE"].removesuffix("/record.key")
    (name,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    assert next(one for one in pod["volumes"] if one["name"] == name)["secret"]["secretName"] == "mine"
    assert "RECORD" not in str(render())


def test_autoscalers_target_their_deployments() -> None:
    manifests = render(WATCHED)
    gateway = of_kind(manifests, "HorizontalPodAutoscaler")
    assert gateway["spec"]["scaleTargetRef"]["name"] == "rel-gateway"
    for name, metrics in {"prefill": ["busy"], "decode": ["sequences", "kv-usage", "itl-p99"]}.items():
        scaled = of_kind(manifests, "ScaledObject", name)["spec"]
        assert scaled["scaleTargetRef"]["name"] == f"rel-{name}"
        assert [trigger["name"] for trigger in scaled["triggers"]] == metrics
        assert "replicas" not in of_kind(manifests, "Deployment", name)["spec"]
    # A query counts only the pods of its own kind, not those of a kind with the same prefix.
    query = of_kind(manifests, "ScaledObject", "prefill")["spec"]["triggers"][0]["metadata"]["query"]
    own = re.compile(re.search(r'pod=~"([^"]+)"', query)[1])
    assert own.fullmatch("rel-prefill-5f7c9d8b6-x2x4z")
    assert not own.fullmatch("rel-prefill-big-5f7c9d8b6-x2x4z")


def test_scaling_by_busy_workers() -> None:
    """KEDA divides the time of steps by that of the prefill workers of a pod; pods without any are not asked."""
    scaled = {"autoscaling": {**SCALED, "busyPercent": 60}}
    spec = of_kind(render({"pools": {**BOTH, "both": {**BOTH["both"], **scaled}}}), "ScaledObject", "both")["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["name"], trigger["metricType"], trigger["metadata"]["threshold"]) == ("busy", "AverageValue", "120")
    assert 'container=~"prefill-.*"' in trigger["metadata"]["query"]
    decode = of_kind(render({"pools": {"decode": scaled}}), "ScaledObject", "decode")["spec"]
    assert "busy" not in [each["name"] for each in decode["triggers"]]


def test_a_pods_node_and_workers_share_a_gpu() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    example = textwrap.dedent(re.search(r"\n((?:    .*\n)+)", page[page.index("dynamic resource allocation:") :])[1])
    manifests = render(yaml.safe_load(example))
    for manifest in manifests:
        check_schema(manifest)
    pod = pod_of(of_kind(manifests, "Deployment", "decode"))
    prepare, node = pod["initContainers"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    for container in (node, *pod["containers"]):
        assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert "PILLION_KEEPER_SOCKET" not in environment(node), "no pool on a real GPU has been kept yet"
    assert (environment(node)["PILLION_KV_DEVICE"], environment(node)["PILLION_KV_POOL_BYTES"]) == ("cuda", "0")
    assert "claims" not in prepare["resources"], "preparing needs none"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"pools": {"decode": {"replica": 3}}}, "replica"),
        ({"pools": {"idle": {"replicas": 1}}}, "neither prefill nor decode"),
        ({"pools": {"gateway": {"decode": 1}}}, "gateway"),
        ({"pools": {"both": {"decode": 1, "autoscaling": {"enabled": True}}}}, "no target is set"),
        ({"gateway": {"tls": {"clientCertificates": True}}}, "needs gateway.tls.existingSecret"),
        ({"redis": {"minimal": False}}, "redis.existingSecret"),
        ({"adapters": {"modules": ["sql=/adapters/sql"]}}, "enabled is false"),
    ],
)
def test_refusals(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        render(values)


def test_the_pool_fits_its_limits() -> None:
    """A page counts against its first writer, and with the defaults a worker may be the first for all pages."""
    sizes = {"Gi": 2**30, "GiB": 2**30}
    for name in ("prefill", "decode"):
        pod = pod_of(of_kind(render(), "Deployment", name))
        node = next(one for one in pod["initContainers"] if one["name"] == "kvnode")
        number, unit = re.fullmatch(r"(\d+)(GiB)", environment(node)["PILLION_KV_POOL_BYTES"]).groups()
        pool_bytes = int(number) * sizes[unit]
        for container in (node, *pod["containers"]):
            limit = container["resources"]["limits"]["memory"]
            assert int(limit.removesuffix("Gi")) * sizes["Gi"] > pool_bytes, container["name"]


def test_the_documented_pool_selects_gateways() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    objects = [one for text in examples for one in yaml.safe_load_all(text)]
    pool = of_kind(objects, "InferencePool")["spec"]
    manifests = render(name="pillion")
    selected = [
        one["metadata"]["name"]
        for one in manifests
        if one["kind"] in ("Deployment", "StatefulSet")
        and pool["selector"]["matchLabels"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert selected == ["pillion-gateway"]
    ports = pod_of(of_kind(manifests, "Deployment", "gateway"))["containers"][0]["ports"]
    assert pool["targetPorts"] == [{"number": one["containerPort"]} for one in ports if one["name"] == "http"]
    assert of_kind(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["name"] == "pillion"
