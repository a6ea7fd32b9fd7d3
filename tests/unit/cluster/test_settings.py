"""A cluster's file: its fields, and one sentence for each error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from inlay.cli.main import main
from inlay.cluster.settings import ClusterSettings
from inlay.errors import ParameterError
from tests.raising import raises


def test_an_empty_file_is_a_cluster_of_one(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text("")
    settings = ClusterSettings.read(path)
    assert (settings.model, settings.replicas.fixed, settings.ingress.count) == ("demo", 1, 1)
    assert settings.engine_settings()["max_waiting"] == 1024
    assert settings.to_dict() == {}


def test_cluster_does_not_use_shadow_sampling():
    with raises("cluster.invalid_setting", ParameterError, names="shadow"):
        ClusterSettings.of({"engine": {"shadow": 0.1}})


def test_file_sets_everything_and_paths_are_relative_to_it(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
        model: demo
        served_names: [small]
        route_prefix: /llm
        engine: {kv_memory: 64MiB, max_num_seqs: 8, max_waiting: 100, reuse: exact, adapters: {sql: adapters/sql}}
        replicas: {min: 2, max: 5, target_ongoing_requests: 4, kv_pressure: 0.9, cpus: 0.5, memory: 2GiB}
        ingress: {count: 2, cpus: 0.2}
        router: {bound: 1.5, memory: 64MiB, stalled_s: 3}
        schemas: {folder: schemas, files: [docs.xml]}
        server: {timeout_s: 60, log_format: json}
        http: {port: 9000}
        """
    )
    settings = ClusterSettings.read(path)
    assert settings.engine_settings()["adapters"] == {"sql": str(tmp_path / "adapters/sql")}
    assert settings.replicas.fixed is None
    assert settings.replicas.most == 5
    assert settings.prompt_settings() == {"reuse": "exact", "max_num_seqs": 40, "max_waiting": 500}
    assert settings.schemas.folder == tmp_path / "schemas"
    assert settings.schemas.files == (tmp_path / "docs.xml",)
    server = settings.server_settings()
    assert (server.served_names, server.root_path, server.timeout_s) == (("small",), "/llm", 60)
    assert settings.router.settings().bound == 1.5
    assert ClusterSettings.of(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replica: {count: 3}", "there is no setting replica"),
        ("replicas: {count: 0}", "replicas.count: Input should be greater than or equal to 1"),
        ("replicas: {count: 2, max: 3}", "replicas: give count, or min and max"),
        ("replicas: {min: 4, max: 3}", "replicas: give min and max together, and min no more than max"),
        ("replicas: {memory: lots}", "memory is 'lots'; write a number of bytes"),
        ("engine: {kv_memroy: 1GiB}", "LLM has no setting 'kv_memroy'"),
        (
            "engine: {adapters: [sql]}",
            "engine: adapters is ['sql']; give names with folders, as in {sql: adapters/sql}",
        ),
        ("engine: {adapters: {demo: x}}", "engine: an adapter and the model are called 'demo'; give each its own name"),
        ("server: {hots: x}", "server: there is no setting 'hots'"),
        ("server: {host: 0.0.0.0}", "server: there is no setting 'host'"),
        ("router: {bound: 0.5}", "bound is 0.5; give a number above 1"),
        ("router: {kind: best}", "kind is 'best'; use one of module, prefix, power-of-two, round-robin"),
        ("ingress: {count: 2}", "several ingresses need schemas: folder"),
        ("http: {host: 0.0.0.0}", "without keys everybody there may use the model"),
        ("model: [", ":1:9: this is no YAML"),
        ("- 1", "a cluster is a mapping"),
        ("name: a b", "name: String should match pattern"),
        ("model: 2024-01-01", "no plain data"),
    ],
)
def test_errors_are_one_sentence(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError) as error:
        ClusterSettings.read(path)
    assert said in str(error.value)
    assert main(["deploy", str(path), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("inlay: ")


def test_deploy_dry_run_prints_the_ray_serve_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cluster.yaml"
    path.write_text("model: demo\nreplicas: {count: 3}\nhttp: {port: 8100}\n")
    assert main(["deploy", str(path), "--dry-run"]) == 0
    said = yaml.safe_load(capsys.readouterr().out)
    (application,) = said["applications"]
    assert application["import_path"] == "inlay.cluster.application:build"
    assert ClusterSettings.of(application["args"]) == ClusterSettings.read(path)
    assert said["http_options"] == {"host": "127.0.0.1", "port": 8100}
    assert main(["deploy", str(path), "--detach"]) == 2
    assert "--detach leaves a cluster running that others started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "private"),
    [
        ({}, None),
        ({"server": {"api_keys": ["one"]}}, False),
        ({"server": {"api_keys": ["one"]}, "engine": {"store_private": True}}, True),
    ],
)
def test_cluster_with_keys_stores_marked_parts_only_if_enabled(said: dict, private: bool | None):
    assert ClusterSettings.of(said).engine_settings().get("store_private") is private
