"""Short attacks on a server: the measured figures, and that harm is reported."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import pytest

from inlay.engine.core import EngineCore
from inlay_lab.bench.serve.attacks import Attack, Send, attacks, rounds_of
from inlay_lab.bench.serve.under_attack import Keys, Seen, run_attack
from tests.server.server.conftest import Site, running, small_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = small_model(max_num_seqs=6)
    with running(llm) as found:
        yield found
    llm.shutdown()


def attacked(site: Site, attack: Attack, seconds: float = 0.5) -> Seen:
    return asyncio.run(run_attack(f"http://127.0.0.1:{site.port}", os.getpid(), Keys(), attack, seconds))


@pytest.mark.parametrize("name", ["fields", "true", "leave-streams"])
def test_short_attack_is_measured(site: Site, name: str):
    seen = attacked(site, attacks(1)[name], 2.0)  # long enough for the victim on a busy machine
    assert seen.waits
    assert seen.alone > 0
    assert seen.probes
    assert seen.failures == []
    assert set(seen.said) <= {"400", "left"}
    assert seen.said
    assert seen.peak >= seen.before > 0


def test_failed_victim_requests_are_reported(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EngineCore, "add", lambda *_: exec("raise RuntimeError('a fault')"))
    seen = attacked(site, attacks(1)["fields"], 0.1)
    assert seen.failures
    assert all("500" in failure for failure in seen.failures)


def test_problems():
    seen = Seen(waits=[0.1, 1.5], probes=[2.0], failures=["the victim got 503"] * 2, before=1000, after=1060)
    seen.said.update({"200": 3, "429": 1, "500": 2})
    assert seen.problems() == [
        "the victim got 503",
        "the victim waited 1.50 s",
        "/health took 2.00 s",
        "memory stays 6% above what it was",
        "the attacker got 500",
    ]
    assert Seen(waits=[0.1], before=1000, after=1050).problems() == []
    assert Seen().problems() == ["the victim got no answer"]


def test_clients_divide_the_requests():
    sends = [[Send("GET", f"/{n}")] for n in range(3)]
    assert list(rounds_of(sends, 2)) == [[sends[0], sends[2]], [sends[1]]]
    assert list(rounds_of(sends[:1], 2)) == [[sends[0]], [sends[0]]]


@pytest.mark.parametrize("name", attacks(1))
def test_bodies_are_json(name: str):
    for sends in attacks(2)[name].rounds()[:2]:
        for send in sends:
            assert not send.body or json.loads(send.body)
