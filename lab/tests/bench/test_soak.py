"""A short soak test: requests are answered, and growth is reported."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
from pathlib import Path

import pytest

from inlay.errors import ParameterError
from inlay_lab.bench.serve.soak import Soak, judged
from inlay_lab.bench.serve.traffic import Seen, Tenant
from inlay_lab.bench.serve.under_attack import memory_of
from tests.commands import run_file
from tests.server.server.conftest import running, small_model

FILE = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"
SHORT = Soak(minutes=5, settle=2)


@pytest.mark.parametrize(
    ("own", "growth", "flat"),
    [
        ([90.0, 100.0, 101.0, 102.0, 99.0], 0.02, True),
        ([90.0, 100.0, 101.0, 103.0, 99.0], 0.03, False),
        ([120.0, 100.0, 98.0, 97.0, 96.0], -0.02, True),  # before it settles, memory may be any size
    ],
)
def test_flat(own: list[float], growth: float, flat: bool):
    found = judged([(2 * size, size) for size in own], SHORT)
    assert (found["growth"], found["flat"]) == (growth, flat)
    assert (found["own_mib"], found["rss_mib"]) == (own, [2 * size for size in own])


@pytest.mark.parametrize("minutes", [10, 11.5])
def test_too_short_soak_is_rejected(minutes: float):
    with pytest.raises(ParameterError, match=rf"a soak of {minutes:g} minutes says nothing.*give it 12 minutes"):
        Soak(minutes=minutes)


def test_memory_of_a_process_excludes_files():
    rss, own = memory_of(os.getpid())
    with mmap.mmap(-1, 64 << 20) as kept:  # not the memory that the process had before
        for at in range(0, len(kept), 4096):
            kept[at] = 1
        assert memory_of(os.getpid())[1] - own > 60 << 20
    assert rss > own > 0


async def ask(url: str, kinds: list[str], seen: Seen) -> None:
    async def at_once() -> None:
        pass

    tenant = Tenant(url, None, random.Random(0), seen, at_once, admin=True)
    for kind in kinds:
        await getattr(tenant, kind)()
    tenant.leave()


def test_expected_rejections_pass_and_others_are_reported():
    llm = small_model(max_num_seqs=6)
    with running(llm) as site:
        seen, url = Seen(), f"http://127.0.0.1:{site.port}"
        asyncio.run(ask(url, ["mistake"] * 12 + ["completion"] * 3, seen))
        assert seen.problems == []
        assert set(seen.statuses) == {200, 400, 404}
        asyncio.run(ask(url, ["parts"] * 3, seen))  # two thousand letters exceed such a context
        assert seen.problems
        assert all(problem.startswith("POST /v1/chat/completions: 400 ") for problem in seen.problems)
    llm.shutdown()


@pytest.mark.long
def test_short_soak_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    options = ["--minutes", "0.3", "--settle", "0.1", "--interval", "3", "--rate", "40"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the server: more threads would wait for other tests' threads
    with pytest.raises(SystemExit) as ended:
        run_file(FILE, *options)
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["problems"], found["exit_status"]) == ([], 0)
    assert ended.value.code == int(not found["flat"])  # memory may not settle in so short a time
    assert len(lines) == len(found["rss_mib"]) == 6
    assert all(line.startswith(f"minute {0.05 * (at + 1):.3g}: ") for at, line in enumerate(lines))
    assert found["kinds"]["schema"] > 0
    assert found["requests"] == sum(found["statuses"].values()) > 20
    assert found["statuses"]["201"] > 0
