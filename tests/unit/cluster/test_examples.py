"""The examples of clusters: files for other programs are checked as far as possible without those programs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import inlay.cluster
from inlay.cli.main import load_command
from inlay.cluster.settings import ClusterSettings

EXAMPLES = Path(__file__).parents[3] / "examples/cluster"
#: Of a service in the Compose specification, those that the example may use.
SERVICE = {
    *("image", "command", "environment", "volumes", "ports", "shm_size", "stop_grace_period", "healthcheck"),
    *("depends_on", "restart", "deploy"),
}


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


@pytest.mark.parametrize("name", ["cluster.yaml", "compose-cluster.yaml"])
def test_example_configurations_are_read(name: str):
    settings = ClusterSettings.read(EXAMPLES / name)
    for file in settings.schemas.files:
        assert file.resolve().is_file()


def test_compose_file_is_valid():
    said = load("compose.yaml")
    assert set(said) == {"services", "volumes"}
    settings = ClusterSettings.read(EXAMPLES / "compose-cluster.yaml")
    for name, service in said["services"].items():
        assert set(service) <= SERVICE, name
        assert service["image"] == "inlay-cluster"
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            assert source in said["volumes"] or (EXAMPLES / source).is_file()
            assert target.startswith("/")
        assert set(service.get("depends_on", [])) <= set(said["services"])
    head = said["services"]["head"]
    assert head["ports"] == [f"127.0.0.1:{settings.http.port}:{settings.http.port}"]
    assert f":{settings.http.port}/ready" in head["healthcheck"]["test"][-1]
    assert str(settings.schemas.folder) in [volume.split(":")[1] for volume in head["volumes"]]
    (called,) = re.findall(r"inlay (deploy .*?)\"", head["command"])
    _, path, *options = shlex.split(called)
    assert f"./compose-cluster.yaml:{path}:ro" in head["volumes"]
    known = {name for each in load_command("deploy").params for name in each.opts}
    assert {one for one in options if one.startswith("--")} <= known


def test_kuberay_service_is_valid():
    said = load("kuberay.yaml")
    assert (said["apiVersion"], said["kind"]) == ("ray.io/v1", "RayService")
    assert set(said["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    serve = yaml.safe_load(said["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, function = application["import_path"].partition(":")
    assert (Path(inlay.cluster.__file__).parent / f"{module.rpartition('.')[2]}.py").is_file()
    assert function == "build"
    settings = ClusterSettings.of(application["args"])
    assert serve["http_options"] == {"host": settings.http.host, "port": settings.http.port}
    cluster = said["spec"]["rayClusterConfig"]
    pinned = re.search(r"^ray==(.*)$", (EXAMPLES.parent.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= names
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert str(settings.schemas.folder) in mounts
    kv = {mount["mountPath"] for mount in workers["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert settings.engine["store"] in kv
    grace = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.replicas.drain_s


def test_dockerfile_installs_existing_extras():
    lines = (EXAMPLES / "Dockerfile").read_text()
    assert "/src[cluster]" in lines
    assert "--constraint /src/constraints.txt" in lines
    assert "USER 10001" in lines
