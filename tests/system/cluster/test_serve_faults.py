"""A cluster on Ray Serve whose processes are killed: every request ends, nothing is answered wrongly, schemas stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay_lab.bench.deployed import Deployed, deployed

pytest.importorskip("ray", reason="Ray is not installed: pip install 'inlay-llm[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

PML = '<schema name="kept">One of the texts that is always there. <module name="a">And one module.</module></schema>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(tmp_path_factory.mktemp("cluster"), router={"stalled_s": 2.0}) as one:
        yield one


def test_killed_replica_ends_its_streams_with_an_error(cluster: Deployed):
    stream = cluster.stream("Once upon a time", max_tokens=1500, ignore_eos=True)
    json.loads(next(stream))
    max(cluster.processes("engine"), key=lambda process: process.cpu_percent(0.3)).kill()  # that which answers
    last = list(stream)
    said = [json.loads(event) for event in last if event != "[DONE]"]
    errors = [event["error"]["message"] for event in said if "error" in event]
    assert len(errors) == 1
    assert "has gone in the middle of the answer" in errors[0]
    for number in range(4):  # also before Ray has noticed
        status, answer = cluster.ask(f"Prompt {number}")
        assert status == 200, answer
    cluster.wait(lambda: cluster.metric("inlay:router_replicas") == 2)


def test_every_request_ends_after_both_replicas_are_killed(cluster: Deployed):
    outcomes: list[int] = []

    def ask(number: int) -> None:
        outcomes.append(cluster.ask(f"Prompt number {number}", max_tokens=100, ignore_eos=True)[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 6:
            for process in cluster.processes("engine"):
                process.kill()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 12
    assert set(outcomes) <= {200, 503}
    cluster.wait(lambda: cluster.metric("inlay:router_replicas") == 2)
    cluster.wait(lambda: cluster.ask("And again")[0] == 200)


def test_stopped_replica_is_avoided_until_it_resumes(cluster: Deployed):
    stopped, _ = cluster.processes("engine")
    stopped.suspend()
    try:
        for number in range(6):
            status, answer = cluster.ask(f"Another prompt {number}")
            assert status == 200, answer
        cluster.wait(lambda: cluster.metric("inlay:router_stalled") == 1)
    finally:
        stopped.resume()
    cluster.wait(lambda: cluster.metric("inlay:router_stalled") == 0)


def test_disconnect_cancels_the_request(cluster: Deployed):
    stream = cluster.stream("Once upon a time", max_tokens=3500, ignore_eos=True)
    next(stream)
    cluster.wait(lambda: cluster.metric("inlay:num_requests_running") == 1)
    stream.close()  # type: ignore[attr-defined]
    cluster.wait(lambda: cluster.metric("inlay:num_requests_running") == 0, 5)


def test_restarted_ingress_has_its_schemas(cluster: Deployed):
    assert cluster.call("POST", "/v1/schemas", {"pml": PML})[0] == 201
    (ingress,) = cluster.processes("ingress")
    ingress.kill()
    cluster.wait(lambda: ingress.pid not in [one.pid for one in cluster.processes("ingress")])
    cluster.wait(cluster.ready)
    status, schema = cluster.call("GET", "/v1/schemas/kept")
    assert (status, schema["version"]) == (200, 1)
    body = {"model": "demo", "pml": '<prompt schema="kept"><a/>Who?</prompt>', "max_tokens": 4}
    assert cluster.call("POST", "/v1/completions", body)[0] == 200


def test_a_new_version_is_rolled_out_while_requests_are_answered(cluster: Deployed, tmp_path: Path):
    """Another configuration of the replicas: Ray replaces them one by one, and no request is lost."""
    import subprocess
    import sys

    outcomes: list[int] = []
    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            number += 1
            outcomes.append(cluster.ask(f"Prompt {number}")[0])
            over.wait(0.2)

    before = {process.pid for process in cluster.processes("engine")}
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        path = Path(str(cluster.process.args[-1]))  # type: ignore[index]
        changed = tmp_path / "cluster.yaml"
        changed.write_text(path.read_text().replace("max_num_seqs: 16", "max_num_seqs: 8"))
        command = [sys.executable, "-m", "inlay", "deploy", str(changed), "--address", "auto", "--detach"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert found.returncode == 0, found.stderr[-2000:]
        cluster.wait(lambda: not before & {process.pid for process in cluster.processes("engine")}, 90)
    finally:
        over.set()
        asking.join(60)
    assert len(outcomes) > 5
    assert set(outcomes) <= {200, 503}
    assert outcomes.count(503) <= 2  # while the ingress itself is replaced
