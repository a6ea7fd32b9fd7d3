"""Routing of requests by the replicas' stored modules and load."""

from __future__ import annotations

import random
from array import array

import pytest

from inlay.cluster.affinity import Affinity, ResidencyMap, RouterSettings
from inlay.cluster.loads import RequestLoad
from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.errors import ParameterError
from inlay.kv.changes import StoreChanges


def made(replicas: int = 3, **settings: float) -> Affinity:
    affinity = Affinity(ResidencyMap(clock=lambda: 0.0), RouterSettings(prefill_s=1e-3, decode_s=1e-3, **settings))
    for number in range(replicas):
        affinity.join(f"r{number}")
    return affinity


def hold(affinity: Affinity, replica: str, *keys: int, below: tuple[int, ...] = ()) -> None:
    changes = StoreChanges(1, 0, 1, array("Q", keys), array("Q"), array("Q", sorted(below)), whole=True)
    affinity.residency.apply(replica, changes)


def modules(*keys: int, tokens: int = 1000) -> tuple[WantedPiece, ...]:
    return tuple(WantedPiece((key,), tokens, (key + 1000,)) for key in keys)


def wanted(*pieces: WantedPiece, new: int = 10) -> Wanted:
    return Wanted(pieces, sum(piece.tokens for piece in pieces) + new, 1)


def test_overlap_is_the_sum_over_modules_in_any_order():
    affinity = made(home=0.0)
    hold(affinity, "r0", 1)
    hold(affinity, "r1", 2, 3)
    for order in ((1, 2, 3), (3, 2, 1), (2, 1, 3)):
        decision = affinity.choose(wanted(*modules(*order)), 0.0)
        assert decision is not None
        assert (decision.replica, decision.overlap, decision.best) == ("r1", 2000, 2000)


def test_piece_in_several_forms_counts_once():
    affinity = made(home=0.0)
    hold(affinity, "r1", 1, 2)
    decision = affinity.choose(wanted(WantedPiece((1, 2), 500)), 0.0)
    assert decision is not None
    assert (decision.replica, decision.overlap) == ("r1", 500)


def test_a_prefix_counts_up_to_its_first_gap():
    affinity = made(home=0.0)
    chain = (WantedPiece((1,), 64), WantedPiece((2,), 64, chained=True), WantedPiece((3,), 64, chained=True))
    hold(affinity, "r0", 1, 3)
    hold(affinity, "r2", 1, 2)
    decision = affinity.choose(wanted(*chain), 0.0)
    assert decision is not None
    assert (decision.replica, decision.overlap) == ("r2", 128)


def test_a_tier_below_counts_its_credit():
    affinity = made(home=0.0, credit_below=0.5)
    hold(affinity, "r0", below=(1001,))
    first = affinity.choose(wanted(*modules(1)), 0.0)
    assert first is not None
    assert (first.replica, first.overlap) == ("r0", 500)
    hold(affinity, "r1", 1)
    second = affinity.choose(wanted(*modules(1)), 0.0)
    assert second is not None
    assert (second.replica, second.overlap) == ("r1", 1000)


def test_replica_with_a_long_queue_is_avoided():
    affinity = made(2, home=0.0, bound=100.0)
    hold(affinity, "r0", 1)
    affinity.loads.begin("r0", RequestLoad(0.9, 0.0))
    stays = affinity.choose(wanted(*modules(1)), 0.0)
    affinity.loads.begin("r0", RequestLoad(0.2, 0.0))
    moves = affinity.choose(wanted(*modules(1)), 0.0)
    assert stays is not None
    assert moves is not None
    assert (stays.replica, stays.moved) == ("r0", False)
    assert (moves.replica, moves.moved) == ("r1", True)


def test_unknown_module_has_the_same_home_in_all_routers():
    one, other = made(5), Affinity(ResidencyMap(clock=lambda: 0.0), RouterSettings(prefill_s=1e-3))
    for number in (3, 1, 4, 0, 2):  # the other one met them in another order
        other.join(f"r{number}")
    homes = set()
    for key in range(40):
        choices = [affinity.choose(wanted(*modules(key)), 0.0) for affinity in (one, other)]
        assert choices[0] is not None
        assert choices[1] is not None
        assert choices[0].replica == choices[1].replica
        homes.add(choices[0].replica)
    assert len(homes) == 5


def test_few_homes_change_when_a_replica_leaves():
    affinity = made(5)
    before = affinity.homes(modules(*range(200), tokens=1))
    affinity.forget("r2")
    after = affinity.homes(modules(*range(200), tokens=1))
    moved = sum(a != b for a, b in zip(before, after, strict=True) if a != "r2")
    assert moved < 30  # those that the bound moves


def test_homes_are_balanced_and_held_modules_stay():
    affinity = made(4)
    hold(affinity, "r3", 5)
    pieces = modules(*range(64), tokens=100)
    homes = affinity.homes(pieces)
    assert homes[5] == "r3"
    most = max(homes.count(f"r{number}") for number in range(4))
    assert most <= 64 / 4 * 1.25 + 1
    assert affinity.homes(pieces, without=[f"r{number}" for number in range(4)]) == []


def test_hot_module_gets_a_second_home():
    """One module alone, again and again: no replica is given more than the bound, and all of it is known."""
    affinity = made(4)
    given = dict.fromkeys(affinity.loads.names, 0)
    second = 0
    for _ in range(400):
        decision = affinity.choose(wanted(*modules(1), new=1000), 0.0)
        assert decision is not None
        affinity.loads.begin(decision.replica, decision.work)
        affinity.loads.first_token(decision.replica, decision.work)
        affinity.loads.end(decision.replica)
        affinity.residency.note(decision.replica, (1,))
        given[decision.replica] += 1
        second += decision.second_home
    assert 1 <= second <= 3
    shares = affinity.loads.given_s
    assert shares.max() <= 1.3 * shares.mean()


def test_excluded_replicas_get_nothing():
    affinity = made(3)
    hold(affinity, "r0", 1)
    decision = affinity.choose(wanted(*modules(1)), 0.0, without={"r0"})
    assert decision is not None
    assert decision.replica != "r0"
    assert affinity.choose(wanted(*modules(1)), 0.0, without={"r0", "r1", "r2"}) is None


def test_without_overlap_the_least_busy_replica_is_chosen():
    affinity = made(3)
    affinity.loads.begin("r0", RequestLoad(0.1, 0.0))
    affinity.loads.begin("r1", RequestLoad(0.1, 0.0))
    decision = affinity.choose(Wanted((), 100, 5), 0.0)
    assert decision is not None
    assert decision.replica == "r2"


def test_without_overlap_requests_are_spread_evenly():
    """This holds when some answers end sooner: a replica that has just finished several does not get the next ones
    in a row.
    """
    affinity = made(4)
    sent = []
    for number in range(80):
        decision = affinity.choose(Wanted((), 100, 5), 0.0)
        assert decision is not None
        sent.append(decision.replica)
        affinity.loads.begin(decision.replica, decision.work)
        affinity.loads.first_token(decision.replica, decision.work)
        if number % 20 == 19:
            for _ in range(3):
                affinity.loads.end("r2")
    for first in range(0, 80, 4):
        assert len(set(sent[first : first + 4])) == 4


def test_replica_with_many_answers_is_avoided():
    affinity = made(3)
    for _ in range(30):
        affinity.loads.begin("r0", RequestLoad(0.0, 0.0))
    for name in ("r1", "r2"):
        affinity.loads.begin(name, RequestLoad(0.0, 0.1))
    decision = affinity.choose(Wanted((), 10, 5), 0.0)
    assert decision is not None
    assert decision.replica != "r0", "though it was given less"


def test_replicas_join_and_leave_in_any_order():
    """Places in the arrays and bits of the map follow their names."""
    draws = random.Random(3)
    affinity = made(0)
    there: set[str] = set()
    for step in range(300):
        name = f"r{draws.randint(0, 9)}"
        if name in there and draws.random() < 0.4:
            affinity.forget(name)
            there.discard(name)
        elif name not in there:
            affinity.join(name)
            hold(affinity, name, int(name[1:]) + 1)
            there.add(name)
        if there:
            asked = draws.choice(sorted(there))
            decision = affinity.choose(wanted(*modules(int(asked[1:]) + 1)), float(step))
            assert decision is not None
            assert decision.replica == asked
            assert decision.overlap == 1000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bound": 1.0}, "bound is 1.0; give a number above 1"),
        ({"credit_below": 1.5}, "credit_below is 1.5; give a number from 0 to 1"),
        ({"prefill_s": 0.0}, "prefill_s is 0.0; give a number of seconds above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], said: str):
    with pytest.raises(ParameterError, match=said):
        RouterSettings(**settings)
