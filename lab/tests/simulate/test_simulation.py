"""Small simulated clusters: they count right, and the same seed gives the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.cli.main import main
from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.errors import ParameterError
from inlay_lab.simulate.costs import Costs
from inlay_lab.simulate.replica import Job, Replica, TokenStore
from inlay_lab.simulate.routers import ROUTERS
from inlay_lab.simulate.run import SimulationResult, simulate
from inlay_lab.simulate.traces import SimulatedRequest, ZipfTraffic, arrivals, read_trace

COSTS = Costs(prefill_s=1e-3, pass_s=0.01, decode_s=1e-3, chunk=1000, pool=10_000)


def request(at: float, *pieces: WantedPiece, new: int = 100, answer: int = 10) -> SimulatedRequest:
    return SimulatedRequest(at, Wanted(pieces, sum(piece.tokens for piece in pieces) + new), answer)


def alone(*requests: SimulatedRequest, costs: Costs = COSTS) -> tuple[list[Job], list[float]]:
    """Run requests on one replica; returns its jobs and the end of each answer."""
    from inlay_lab.simulate.routers import decision_for

    ends: list[float] = []
    replica = Replica("one", costs, lambda job: None, lambda job: ends.append(replica.now))
    jobs = []
    for one in requests:
        jobs.append(Job(one, decision_for(replica)))
        replica.add(jobs[-1], one.at)
    replica.advance(1e9)
    assert replica.running == 0
    return jobs, ends


def run(router: str, exponent: float = 1.0, each: int = 4, load: float = 0.6, seed: int = 0) -> SimulationResult:
    traffic = ZipfTraffic(modules=600, exponent=exponent, each=each, module_tokens=500, new_tokens=50, answer_tokens=20)
    drawn = traffic.requests(1500, seed)
    costs = Costs(pool=20_000)
    mean = sum(costs.service_s(one.wanted.tokens, one.answer) for one in drawn) / len(drawn)
    return simulate(arrivals(drawn, load * 10 / mean, seed), router=router, replicas=10, costs=costs, seed=seed)


def test_prompt_takes_its_passes_and_each_answer_token_one():
    (job,), (end,) = alone(request(0, new=500, answer=10))
    assert job.ttft_s == pytest.approx(0.01 + 0.5)
    assert end - job.ttft_s == pytest.approx(10 * (0.01 + 0.001))


def test_computed_module_is_found():
    module = WantedPiece((1,), 1000)
    first, second = alone(request(0, module), request(10, module))[0]
    assert (first.found, first.ttft_s) == (0, pytest.approx(1.1 + 2 * 0.01))
    assert (second.found, second.ttft_s) == (1000, pytest.approx(0.1 + 0.01))


def test_a_prompt_waits_for_the_one_before_it():
    jobs, _ = alone(request(0, new=1000, answer=1), request(0, new=1000, answer=1))
    assert jobs[1].ttft_s > 1.9 * jobs[0].ttft_s


def test_prompts_arriving_during_a_pass_share_the_next_one():
    """Both have their tokens at its end, and each running answer takes its part of the pass."""
    jobs, _ = alone(request(0, answer=20), request(0.05), request(0.06))
    assert jobs[0].ttft_s == pytest.approx(0.01 + 0.1)
    assert [job.request.at + job.ttft_s for job in jobs[1:]] == [pytest.approx(0.11 + 0.01 + 0.001 + 0.2)] * 2


def test_prompt_arriving_during_decode_waits_for_the_pass():
    first, second = alone(request(0, answer=50), request(0.11 + 3.5 * 0.011))[0]
    assert first.ttft_s == pytest.approx(0.11)
    assert second.ttft_s == pytest.approx(0.5 * 0.011 + 0.01 + 0.001 + 0.1)


def test_rest_of_a_pass_goes_to_the_next_prompt():
    first, second, third = alone(request(0, new=10), request(0.001, new=700), request(0.002, new=500))[0]
    passed = first.ttft_s + 0.01 + 0.001 + 1.0
    assert second.ttft_s + 0.001 == pytest.approx(passed)
    assert third.ttft_s + 0.002 == pytest.approx(passed + 0.01 + 2 * 0.001 + 0.2)


def test_module_of_an_earlier_prompt_in_the_pass_is_found():
    module = WantedPiece((1,), 500)
    _, second, third = alone(request(0, new=10), request(0.001, module), request(0.002, module))[0]
    assert (second.found, third.found) == (0, 500)
    assert second.ttft_s + 0.001 == pytest.approx(third.ttft_s + 0.002)


def test_a_chain_is_found_up_to_its_first_gap():
    chain = tuple(WantedPiece((key,), 100, chained=key > 1) for key in (1, 2, 3))
    broken = (chain[0], WantedPiece((9,), 100, chained=True), chain[2])
    jobs, _ = alone(request(0, *chain), request(10, *broken), request(20, *chain))
    assert [job.found for job in jobs] == [0, 100, 300]


def test_lower_tiers_are_read_faster_than_computed():
    small = Costs(prefill_s=1e-3, pass_s=0.01, decode_s=1e-3, chunk=1000, pool=1_000, below=10_000, below_s=1e-4)
    one, other = WantedPiece((1,), 900), WantedPiece((2,), 900)
    jobs, _ = alone(request(0, one), request(10, other), request(20, one), costs=small)
    assert (jobs[2].found, jobs[2].read) == (0, 900)
    assert jobs[0].ttft_s / 3 > jobs[2].ttft_s > 0.1


def test_least_recently_used_is_evicted():
    store = TokenStore(100)
    assert store.put(1, 60) == []
    assert store.put(2, 40) == []
    assert store.put(1, 60) == []
    assert store.put(3, 30) == [2]
    assert store.put(4, 101) == []
    assert 4 not in store
    assert store.tokens == 90


@pytest.mark.parametrize("router", ROUTERS)
def test_same_seed_gives_the_same_result(router: str):
    one, other = (run(router).to_dict() for _ in range(2))
    for name in ("decision_us", "decision_us_p99"):
        del one[name], other[name]
    assert one == other


def test_module_affinity_finds_more_and_answers_sooner():
    ours, prefix, two = (run(name) for name in ("module", "prefix", "power-of-two"))
    assert ours.hit_share > prefix.hit_share + 0.1
    assert ours.hit_share > two.hit_share + 0.1
    assert ours.ttft_mean_s < 0.75 * prefix.ttft_mean_s
    assert ours.ttft_p99_s < prefix.ttft_p99_s


def test_predicted_share_equals_the_hit_share():
    ours = run("module")
    assert ours.predicted_share == pytest.approx(ours.hit_share, abs=0.1)


def test_no_router_does_better_than_the_best_replica_alone():
    """Most of the slowest answers' time is prefill of content that no single replica stores together."""
    ours, two = run("module"), run("power-of-two")
    assert two.least_p99_s is None
    assert ours.least_p99_s is not None
    assert 0.8 * ours.ttft_p99_s < ours.least_p99_s < ours.ttft_p99_s


def test_hot_modules_keep_replicas_balanced():
    assert run("module", exponent=1.3).imbalance < 1.5


def test_without_sharing_module_affinity_matches_power_of_two():
    for load in (0.3, 0.8):
        ours, two = (run(name, each=0, load=load) for name in ("module", "power-of-two"))
        assert ours.hit_share == two.hit_share == 0
        assert ours.ttft_mean_s <= 1.02 * two.ttft_mean_s
        assert ours.ttft_p99_s < two.ttft_p99_s


def test_our_traces_are_read(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2.5, "modules": [["a", 100], ["b", 50]], "new": 20, "answer": 5}\n\n'
        '{"at": 2, "modules": [["b", 50]], "new": 1, "answer": 1}\n'
    )
    first, second = read_trace(path)
    assert (first.at, second.at, second.wanted.tokens, second.answer) == (0, 0.5, 170, 5)
    assert first.wanted.pieces[0] == second.wanted.pieces[1]


def test_traces_of_mooncake_are_read_as_chains(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]}\n')
    (one,) = read_trace(path, block_tokens=512)
    assert [piece.tokens for piece in one.wanted.pieces] == [512, 512, 75]
    assert [piece.chained for piece in one.wanted.pieces] == [False, True, True]
    assert (one.wanted.tokens, one.answer) == (1100, 7)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ('{"at": -1, "modules": [], "new": 1, "answer": 1}', "at is -1, and must be a time of at least 0"),
        ('{"at": 1, "modules": [["a", 0]], "new": 1, "answer": 1}', "tokens is 0"),
        ('{"at": 1, "modules": [], "new": 1}', "'answer' is missing"),
        ("[1]", "'modules' is missing|this is no request"),
    ],
)
def test_invalid_line_is_located(tmp_path: Path, line: str, said: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ParameterError, match=rf"trace.jsonl:2: this is no request.*({said})|{said}"):
        read_trace(path)


def test_costs_round_trip_through_a_file(tmp_path: Path):
    path = tmp_path / "costs.json"
    path.write_text(COSTS.to_json())
    assert Costs.from_file(path) == COSTS
    path.write_text('{"prefil_s": 1}')
    with pytest.raises(ParameterError, match="costs are an object with machine, prefill_s"):
        Costs.from_file(path)
    path.write_text('{"prefill_s": 0}')
    with pytest.raises(ParameterError, match="prefill_s is 0; give a number of seconds above 0"):
        Costs.from_file(path)


SMALL = ["simulate", "--replicas", "4", "--requests", "200", "--modules", "100", "--module-tokens", "200"]


def test_the_command_compares_routers(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    drawing = tmp_path / "drawing.svg"
    assert main([*SMALL, "--zipf", "0.7,1.3", "--load", "30,60", "--json", "--plot", str(drawing)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 2 * 4
    assert {row["router"] for row in rows} == set(ROUTERS)
    assert all(0 <= row["hit_share"] <= 1 and row["ttft_p99_s"] >= row["ttft_p50_s"] > 0 for row in rows)
    assert b"time to the first token" in drawing.read_bytes() or drawing.stat().st_size > 1000
    assert main([*SMALL, "--router", "module,round-robin"]) == 0
    assert "round-robin" in capsys.readouterr().out


def test_the_command_replays_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * at, "input_length": 900, "output_length": 3, "hash_ids": [1, 2]} for at in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["simulate", str(path), "--replicas", "2", "--router", "module", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["traffic"] == "trace.jsonl"
    assert row["load"] is None
    assert row["hit_share"] > 0.9
    assert main(["simulate", str(path), "--replicas", "2", "--load", "50", "--router", "module", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["load"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router", "best"], "--router is 'best'; use module, prefix, power-of-two, round-robin"),
        (["--zipf", "x"], "--zipf is 'x'; write a number"),
        (["--load", "0"], "--load is 0; give per cents above 0"),
        (["--replicas", "0"], "--replicas is 0; give 1 to 10,000"),
        (["--per-prompt", "101", "--modules", "100"], "each prompt takes 101 of 100 modules"),
        (["--costs", "nowhere.json"], "nowhere.json: cannot be read"),
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str):
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_costs_are_measured_on_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "costs.json"
    assert main(["simulate", "--calibrate", str(path), "--model", "demo"]) == 0
    costs = Costs.from_file(path)
    assert costs.pool > 1000
    assert 1e-9 < costs.prefill_s < 1
    assert main([*SMALL, "--router", "module", "--costs", str(path), "--json"]) == 0
    assert "demo" in json.loads(capsys.readouterr().out)["costs"]["machine"]
