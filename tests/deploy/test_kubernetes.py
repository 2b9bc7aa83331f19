"""The Kubernetes manifests are valid, belong together, and fit the daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

import ffd
from ffd.cli.main import run
from ffd.cli.output import EXIT_USAGE
from ffd.config import NodeSettings, Settings, load
from tests.deploy.tools import AFTER_DRAIN_S, DEPLOY

BASE = DEPLOY / "kubernetes" / "base"
PODMONITOR_SCHEMA = json.loads((Path(__file__).parent / "podmonitor.schema.json").read_text())

# Kubernetes supports about three releases at a time; the oldest here has long left support.
VERSIONS = ["1.29", "1.33", kubernetes_validate.latest_version()]

Manifest = dict[str, Any]


def _read(name: str) -> Manifest:
    (document,) = yaml.safe_load_all((BASE / name).read_text())
    assert isinstance(document, dict)
    return document


KUSTOMIZATION = _read("kustomization.yaml")
MANIFESTS = {name: _read(name) for name in KUSTOMIZATION["resources"]}
CORE = [name for name, manifest in MANIFESTS.items() if manifest["kind"] != "PodMonitor"]


def _one(kind: str) -> Manifest:
    (found,) = (manifest for manifest in MANIFESTS.values() if manifest["kind"] == kind)
    return found


def _settings() -> Settings:
    """What a daemon in the cluster reads, without the Secret."""
    return load(BASE / "ffd.toml", {})


def _pods() -> Iterator[Manifest]:
    yield _one("Deployment")["spec"]["template"]
    yield _one("Job")["spec"]["template"]


def _container(pod: Manifest) -> Manifest:
    (container,) = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


DEPLOYMENT = _one("Deployment")["spec"]
DAEMON = _container(DEPLOYMENT["template"])
PODS = pytest.mark.parametrize("pod", list(_pods()), ids=["daemon", "migrate"])


# Valid


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CORE)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def test_a_misspelt_field_would_be_noticed() -> None:
    wrong = json.loads(json.dumps(_one("Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessprobe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_prometheus_operator_knows_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(PODMONITOR_SCHEMA)
    jsonschema.Draft202012Validator(PODMONITOR_SCHEMA).validate(_one("PodMonitor"))


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [("spec", "podMetricEndpoints", []), ("endpoint", "scrape_interval", "15s"), ("endpoint", "interval", "15")],
)
def test_a_misspelt_field_of_the_podmonitor_would_be_noticed(where: str, key: str, value: object) -> None:
    wrong = json.loads(json.dumps(_one("PodMonitor")))
    spec = wrong["spec"]
    (spec if where == "spec" else spec["podMetricsEndpoints"][0])[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(PODMONITOR_SCHEMA).validate(wrong)


# Belong together


def test_the_kustomization_names_every_file_and_only_files_that_exist() -> None:
    generated = [name for each in KUSTOMIZATION["configMapGenerator"] for name in each["files"]]
    there = {path.name for path in BASE.iterdir()} - {"kustomization.yaml"}
    assert set(MANIFESTS) | set(generated) == there


def test_every_selector_finds_the_daemons_and_never_the_migration() -> None:
    daemon, migrate = (pod["metadata"]["labels"].items() for pod in _pods())
    selectors = [
        DEPLOYMENT["selector"]["matchLabels"],
        _one("Service")["spec"]["selector"],
        _one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        _one("PodMonitor")["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in DEPLOYMENT["template"]["spec"]["topologySpreadConstraints"]),
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= daemon
        assert not selector.items() <= migrate


def test_the_network_policy_covers_daemons_and_migration() -> None:
    selector = _one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert selector
    for pod in _pods():
        assert selector.items() <= pod["metadata"]["labels"].items()


def test_the_network_policy_opens_health_metrics_names_and_postgresql_alone() -> None:
    spec = _one("NetworkPolicy")["spec"]
    port = int(_settings().http.bind.rpartition(":")[2])
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert spec["ingress"] == [{"ports": [{"port": port, "protocol": "TCP"}]}]
    assert all(rule["ports"] for rule in spec["egress"]), "a rule without ports opens all of them"
    opened = {(each["port"], each["protocol"]) for rule in spec["egress"] for each in rule["ports"]}
    assert opened == {(53, "UDP"), (53, "TCP"), (5432, "TCP")}


def test_everybody_means_the_port_that_the_daemon_listens_on() -> None:
    host, _, port = _settings().http.bind.rpartition(":")
    (listening,) = DAEMON["ports"]
    (offered,) = _one("Service")["spec"]["ports"]
    (scraped,) = _one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert host == "0.0.0.0"
    assert listening["containerPort"] == offered["port"] == int(port)
    probes = [DAEMON[name]["httpGet"]["port"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {offered["targetPort"], scraped["port"], *probes} == {listening["name"]}


@PODS
def test_volumes_and_their_sources_exist(pod: Manifest) -> None:
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in _container(pod)["volumeMounts"]} == set(volumes)
    generators = {each["name"]: each["files"] for each in KUSTOMIZATION["configMapGenerator"]}
    for volume in volumes.values():
        if "configMap" in volume:
            assert {each["key"] for each in volume["configMap"]["items"]} <= set(
                generators[volume["configMap"]["name"]]
            )


def test_the_daemon_reads_the_configuration_that_is_mounted() -> None:
    assert DAEMON["args"] == ["run", "--config", _mounted(DEPLOYMENT["template"], "configMap")]


@PODS
def test_the_dsn_is_read_from_the_mounted_secret(pod: Manifest) -> None:
    environ = {each["name"]: each["value"] for each in _container(pod)["env"]}
    assert environ == {"FFD_DATABASE__DSN_FILE": _mounted(pod, "secret")}


def _mounted(pod: Manifest, kind: str) -> str:
    """The path of the one file that a volume of this kind shows."""
    (volume,) = (each for each in pod["spec"]["volumes"] if kind in each)
    (item,) = volume[kind]["items"]
    (mount,) = (each for each in _container(pod)["volumeMounts"] if each["name"] == volume["name"])
    assert mount["readOnly"] is True
    return f"{mount['mountPath']}/{item['path']}"


def test_the_migration_has_a_secret_of_its_own() -> None:
    names = [
        volume["secret"]["secretName"] for pod in _pods() for volume in pod["spec"]["volumes"] if "secret" in volume
    ]
    assert len(names) == len(set(names)) == 2
    comments = (BASE / "kustomization.yaml").read_text()
    assert all(f"create secret generic {name} " in comments for name in names)


# Fit the daemon


def test_a_stop_leaves_time_to_drain() -> None:
    grace = DEPLOYMENT["template"]["spec"]["terminationGracePeriodSeconds"]
    for node in (NodeSettings(), _settings().node):
        assert grace >= node.drain_timeout_s + AFTER_DRAIN_S


def test_liveness_asks_the_event_loop_and_readiness_the_daemon() -> None:
    assert DAEMON["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert DAEMON["startupProbe"]["httpGet"]["path"] == "/livez"
    assert DAEMON["readinessProbe"]["httpGet"]["path"] == "/readyz"


@PODS
def test_the_command_line_is_one_that_ffd_knows(pod: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*_container(pod)["args"], "--help"]) == 0, capsys.readouterr().err


def test_only_a_broken_configuration_ends_the_migration_at_once() -> None:
    (rule,) = _one("Job")["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [EXIT_USAGE]
    assert rule["onExitCodes"]["containerName"] == _container(_one("Job")["spec"]["template"])["name"]


@PODS
def test_the_image_is_that_of_this_version(pod: Manifest) -> None:
    assert _container(pod)["image"] == f"ffd:{ffd.__version__}"


def test_an_update_never_leaves_fewer_daemons_than_before() -> None:
    assert DEPLOYMENT["replicas"] >= 2
    assert DEPLOYMENT["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert _one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@PODS
def test_a_pod_has_no_rights_that_it_does_not_need(pod: Manifest) -> None:
    spec, context = pod["spec"], pod["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["serviceAccountName"] == _one("ServiceAccount")["metadata"]["name"]
    container = _container(pod)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
