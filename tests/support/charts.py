"""The Helm chart rendered by Helm's library, as objects, and checks that hold for all values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

from tests.support.compose import ROOT

CHART = ROOT / "deploy" / "helm" / "pillion"
# Oldest version of Chart.yaml, and newest with schemas in the pinned package.
KUBERNETES_VERSIONS = ("1.33", "1.37")

Manifest = Mapping[str, Any]

# Schemas of third-party kinds, restricted to the fields that the chart uses.
_TEXT, _NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}


def _closed(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_POLICIES = _closed(
    {
        "stabilizationWindowSeconds": _NUMBER,
        "policies": {
            "type": "array",
            "items": _closed({"type": {"enum": ["Pods", "Percent"]}, "value": _NUMBER, "periodSeconds": _NUMBER}),
        },
    }
)
_METADATA = {"type": "object", "required": ["name", "labels"]}
CUSTOM = {
    "ScaledObject": _closed(
        {
            "apiVersion": {"const": "keda.sh/v1alpha1"},
            "kind": _TEXT,
            "metadata": _METADATA,
            "spec": _closed(
                {
                    "scaleTargetRef": _closed({"name": _TEXT}),
                    "minReplicaCount": _NUMBER,
                    "maxReplicaCount": _NUMBER,
                    "pollingInterval": _NUMBER,
                    "fallback": _closed({"failureThreshold": _NUMBER, "replicas": _NUMBER, "behavior": _TEXT}),
                    "advanced": _closed(
                        {
                            "horizontalPodAutoscalerConfig": _closed(
                                {"behavior": _closed({"scaleUp": _POLICIES, "scaleDown": _POLICIES})}
                            )
                        }
                    ),
                    "triggers": {
                        "type": "array",
                        "minItems": 1,
                        "items": _closed(
                            {
                                "type": {"const": "prometheus"},
                                "name": _TEXT,
                                "metricType": {"enum": ["AverageValue", "Value"]},
                                "metadata": _closed(
                                    {"serverAddress": _TEXT, "query": _TEXT, "threshold": _TEXT}, ignoreNullValues=_TEXT
                                ),
                            }
                        ),
                    },
                }
            ),
        }
    ),
    "PodMonitor": _closed(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": _TEXT,
            "metadata": _METADATA,
            "spec": _closed(
                {
                    "selector": _closed({"matchLabels": {"type": "object"}}),
                    "podMetricsEndpoints": {
                        "type": "array",
                        "items": _closed({"port": _TEXT, "path": _TEXT, "interval": _TEXT}),
                    },
                }
            ),
        }
    ),
}


def render(
    values: Mapping[str, Any] | None = None, name: str = "rel", namespace: str = "ns", folder: Path = CHART
) -> list[Manifest]:
    """Return every object of the chart in ``folder``. Raises HelmError for values that the chart refuses."""
    with helm_python.Chart.load(str(folder)) as chart:
        merged = dict(values or {})
        chart.validate_schema(merged)
        files = chart.render(merged, name=name, namespace=namespace)
    texts = (text for path, text in sorted(files.items()) if path.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def check_schema(manifest: Manifest) -> None:
    """Validate a manifest; unknown fields are errors. Raises ValidationError."""
    if manifest["kind"] in CUSTOM:
        jsonschema.validate(manifest, CUSTOM[manifest["kind"]])
        return
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(dict(manifest), version, strict=True)


def of_kind(manifests: Sequence[Manifest], kind: str, name: str = "") -> Manifest:
    """Return the only object of a kind, or the one whose name ends with ``suffix``."""
    found = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def pod_of(manifest: Manifest) -> Manifest:
    """Return the pod spec of a Deployment or StatefulSet."""
    return manifest["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def containers(pod: Manifest) -> Iterator[Manifest]:
    """Return all containers, including init containers and sidecars."""
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def environment(container: Manifest) -> dict[str, str]:
    """Return environment variables: name -> value, or its source."""
    return {one["name"]: one.get("value", str(one.get("valueFrom"))) for one in container.get("env", ())}


def check_restricted(pod: Manifest) -> None:
    """Assert Kubernetes' Pod Security Standard "restricted", and a read-only root file system."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context.get("runAsUser", 1) > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    allowed = {"name", "emptyDir", "secret", "configMap", "persistentVolumeClaim", "csi", "ephemeral", "projected"}
    for volume in pod["volumes"]:
        assert volume.keys() <= allowed, volume
    mounted = {volume["name"] for volume in pod["volumes"]}
    for container in containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        names = [one["name"] for one in container.get("env", ())]
        assert len(names) == len(set(names)), "an environment variable is there twice"


@functools.cache
def lint() -> tuple[str, ...]:
    """Return the findings of `helm lint --strict` above advice."""
    report = helm_python.lint(str(CHART), strict=True)
    advice = 1
    found = [message["error"] for message in report["messages"] if message["severity"] > advice]
    return (*found, *report["errors"])
