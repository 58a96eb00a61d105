"""The manifests and the unit of a Django project's nodes fit the command, each other and the settings' defaults."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasuki.django.conf import GrpcSettings
from tasuki.django.management.commands.tasuki_worker import Command
from tests.conftest import Require

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "django"
UNIT = DEPLOY / "systemd" / "django" / "scheduler@.service"
STOP_GRACE_S = 30  # for what still runs after the drain: TERM, 5 s, KILL, and the report


@pytest.fixture
def documents(require: Require) -> dict[str, list[dict[str, Any]]]:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")
    import yaml

    paths = sorted(MANIFESTS.rglob("*.yaml"))
    return {str(path.relative_to(MANIFESTS)): list(yaml.safe_load_all(path.read_text())) for path in paths}


def of_kind(documents: dict[str, list[dict[str, Any]]], name: str, kind: str) -> dict[str, Any]:
    [found] = [document for document in documents[name] if document["kind"] == kind]
    return found


def options_of(arguments: list[str]) -> dict[str, Any]:
    """Return the options as the command reads them; one that it does not know ends the test."""
    return vars(Command().create_parser("manage.py", "tasuki_worker").parse_args(arguments))


def test_all_manifests_are_part_of_the_whole(documents: dict[str, list[dict[str, Any]]]) -> None:
    [whole], [overlay] = documents["kustomization.yaml"], documents["per-pod/kustomization.yaml"]
    parts = {*whole["resources"], "kustomization.yaml"}
    parts |= {"per-pod/kustomization.yaml", *(f"per-pod/{patch['path']}" for patch in overlay["patches"])}

    assert parts == set(documents)
    assert all({"apiVersion", "kind"} <= set(document) for found in documents.values() for document in found)


def test_nodes_have_the_certificate_where_the_settings_expect_it(documents: dict[str, list[dict[str, Any]]]) -> None:
    pod = of_kind(documents, "nodes.yaml", "Deployment")["spec"]["template"]["spec"]
    certificate = documents["certificates.yaml"][-1]["spec"]
    [container] = pod["containers"]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "tls"]
    [volume] = [one for one in pod["volumes"] if one["name"] == "tls"]
    usual = GrpcSettings()

    assert volume["secret"]["secretName"] == certificate["secretName"] == "scheduler-grpc-tls"
    assert {usual.tls_cert, usual.tls_key, usual.tls_ca} == {f"{mount}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    assert certificate["dnsNames"] == [usual.tls_name]
    assert {"server auth", "client auth"} <= set(certificate["usages"])


def test_the_commands_of_pods_and_units_are_ones_that_the_worker_takes(documents: dict[str, list[dict[str, Any]]]) -> None:
    pod = of_kind(documents, "nodes.yaml", "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"][0] == "tasuki_worker"
    in_pod = options_of(container["args"][1:])
    unit = UNIT.read_text()
    [line] = re.findall(r"manage\.py tasuki_worker ([^']+)'", unit)
    in_unit = options_of(shlex.split(line.replace("$GRPC_%i", "0.0.0.0:50051")))
    [given_s] = re.findall(r"TimeoutStopSec=(\d+)", unit)

    assert in_pod["grpc"].endswith(f":{container['ports'][0]['containerPort']}")
    for options, stop_s in ((in_pod, pod["terminationGracePeriodSeconds"]), (in_unit, int(given_s))):
        assert options["drain_timeout"] + STOP_GRACE_S <= stop_s


def test_nodes_are_probed_bounded_and_named_by_the_machine_or_in_the_overlay_by_the_pod(
    documents: dict[str, list[dict[str, Any]]],
) -> None:
    deployment = of_kind(documents, "nodes.yaml", "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [patched] = documents["per-pod/certificate.yaml"][0]["spec"]["template"]["spec"]["containers"]

    def node_id(one: dict[str, Any]) -> str:
        [found] = [variable for variable in one["env"] if variable["name"] == "TASUKI_NODE_ID"]
        return str(found["valueFrom"]["fieldRef"]["fieldPath"])

    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert all(set(bounds) == {"cpu", "memory"} for bounds in container["resources"].values())
    assert (node_id(container), node_id(patched)) == ("spec.nodeName", "metadata.name")
    budget = of_kind(documents, "nodes.yaml", "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
