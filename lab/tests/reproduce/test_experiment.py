"""Rows and outcomes: agreement of figures, and a lossless round trip through JSON."""

from __future__ import annotations

import json

import pytest

from inlay_lab.reproduce.experiment import Outcome, Published, Row

from .samples import outcome


@pytest.mark.parametrize(
    ("value", "ours", "same"),
    [
        (100.0, 104.9, True),
        (100.0, 105.1, False),
        (-2.0, -2.05, True),
        ((9.3, 63.7), 9.0, True),
        ((9.3, 63.7), 8.0, False),
        ((9.3, 63.7), 66.0, True),
        ("linear", "linear", True),
        ("linear", "quadratic", False),
        ("linear", 1.0, False),
        (0.0, 0.0, True),
    ],
)
def test_rounded_figures_agree(value, ours, same):
    assert Published(value, "table 1").agrees(ours) is same
    assert Row("x", "", ours, Published(value, "table 1")).differs is not same


def test_missing_figure_does_not_differ():
    assert not Row("x", "ms", 1.0).differs
    assert not Row("x", "ms", None, Published(2.0, "table 1")).differs


def test_outcomes_survive_json():
    assert Outcome.read(json.loads(json.dumps(outcome().report()))) == outcome()


@pytest.mark.parametrize("damage", [{"rows": [{"what": "x"}]}, {"tables": None}, {"notes": 3}])
def test_invalid_outcome_is_rejected(damage):
    with pytest.raises((KeyError, TypeError)):
        Outcome.read(outcome().report() | damage)
