"""A cluster on Ray Serve, from end to end: the API of one server, with two replicas behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from inlay import LLM, SamplingParams
from inlay_lab.bench.deployed import Deployed, deployed

pytest.importorskip("ray", reason="Ray is not installed: pip install 'inlay-llm[cluster]'")
pytestmark = pytest.mark.long

PML = (
    '<schema name="docs"><system>Answer from the documents.</system><user>'
    '<module name="bravel">Bravel is a town. It was founded in 1687. The mayor of Bravel is Rosa Tilen.\n</module>'
    '<module name="monar">Monar is a town. It was founded in 1412. The mayor of Monar is Pavel Brinos.\n</module>'
    "</user></schema>"
)
SEGMENTS = 3  # the text that is always there, and two modules
PROMPT = '<prompt schema="docs"><monar/><user>Who is the mayor of Monar?</user></prompt>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(tmp_path_factory.mktemp("cluster")) as one:
        yield one


def test_schemas_are_encoded_and_prompts_find_them(cluster: Deployed):
    """This test must run first: the requests of other tests reach the router too, some time later."""
    assert cluster.metric("inlay:router_keys") == 0
    status, made = cluster.call("POST", "/v1/schemas", {"pml": PML})
    assert status == 201, made
    assert made["encoded"]["tokens"] == made["encoded"]["of"] > 20
    cluster.wait(lambda: cluster.metric("inlay:router_keys") >= SEGMENTS)
    status, answer = cluster.call("POST", "/v1/completions", {"model": "demo", "pml": PROMPT, "max_tokens": 16})
    assert status == 200, answer
    assert answer["inlay"]["module_tokens"] + answer["inlay"]["exact_tokens"] > 20
    assert cluster.call("GET", "/v1/schemas/docs")[0] == 200


def test_cluster_answers_equal_one_server(cluster: Deployed):
    llm = LLM("demo", seed=0, kv_memory="16MiB")
    prompt = "Bravel is a town. The mayor of Bravel is"
    (wanted,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    status, answer = cluster.ask(prompt)
    assert (status, answer["choices"][0]["text"]) == (200, wanted.outputs[0].text)
    *events, done = cluster.stream(prompt, max_tokens=8)
    assert done == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == wanted.outputs[0].text


def test_invalid_requests_are_rejected(cluster: Deployed):
    status, answer = cluster.ask("Once", max_tokens=-1)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    status, answer = cluster.ask([10**6])
    assert status == 400
    status, answer = cluster.ask("Once", structured_outputs={"regex": "(["})
    assert status == 400, answer
    assert "structured_outputs" in answer["error"]["message"]
    assert cluster.call("GET", "/v1/schemas/nobody")[0] == 404


def test_router_metrics_count_requests(cluster: Deployed):
    before = cluster.metric("inlay:router_requests_total")
    for number in range(4):
        assert cluster.ask(f"Prompt number {number}")[0] == 200
    assert cluster.metric("inlay:router_requests_total") == before + 4
    assert cluster.metric("inlay:router_replicas") == 2
    assert cluster.metric("inlay:router_prompt_tokens_total") > 0
