"""The policy meter compares recomputations on live requests in idle time, and ``auto`` takes the results."""

from __future__ import annotations

import json
import statistics

import pytest

from inlay import LLM, ParameterError, Schema
from inlay.check.run import divergence
from inlay.engine.background import policy_meter
from inlay.engine.request import Request
from inlay.measured import Measurements
from inlay.tolerance import Measured
from tests.conftest import tiny
from tests.model.engine.driving import Driver, prompt_of
from tests.raising import raises

SCHEMA = Schema.from_string(
    '<schema name="s">In front of all. <module name="a">The first module of them, say.</module>'
    '<module name="b">The second one, which is longer.</module><module name="c">A third, at last.</module></schema>'
)
KEYS = ["modular", "modular+profiled:0.05", "modular+profiled:0.15", "modular+profiled:0.3"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(policy_meter, "FIRST", 2)
    monkeypatch.setattr(policy_meter, "ENOUGH", 4)
    return tmp_path


def driver_for(**settings) -> Driver:
    driver = Driver(**{"reuse": None, "measure": "auto", "promotion_memory": 0, "max_model_len": 512, **settings})
    driver.schema(SCHEMA)
    return driver


def prompt(names: str, text: str):
    return prompt_of(SCHEMA, names, text)


def ask(driver: Driver, names: str, text: str, **asked) -> Request:
    request = driver.request(prompt(names, text), **{"reuse": "modular", **asked})
    driver.run(request)
    assert request.error is None
    return request


def work_off(driver: Driver) -> None:
    while driver.engine.idle_step(whole=True):
        pass


def test_measurements_compare_full_prefill_with_each_policy():
    driver = driver_for()
    asked = {"abc": "Well?", "cb": "So?"}
    said = {names: ask(driver, names, text).token_ids for names, text in asked.items()}
    work_off(driver)
    rows = driver.engine.meter.rows()
    assert [row.policy for row in rows] == KEYS
    assert [row.prompts for row in rows] == [2] * 4
    assert [row.recomputed for row in rows] == sorted(row.recomputed for row in rows)
    for row in rows:
        found = []
        for names, text in asked.items():
            given = [prompt(names, text)], [said[names]]
            full, other = (driver.llm.distributions(*given, reuse=reuse)[0] for reuse in ("off", row.policy))
            found.append(divergence(full, other))
        assert row.kl == pytest.approx(statistics.fmean(found), rel=1e-3)
        assert row.kl_high > row.kl > 1e-6
    assert driver.all_free()


def test_measuring_stops_after_enough_answers():
    driver = driver_for()
    for number in range(7):
        ask(driver, "abc", f"{number}?")
        work_off(driver)
    assert {row.prompts for row in driver.engine.meter.rows()} == {4}
    tokens = driver.engine.meter.tokens
    ask(driver, "abc", "More?")
    work_off(driver)
    assert driver.engine.meter.tokens == tokens


@pytest.mark.parametrize("reuse", ["off", "exact", "anchored", "isolated"])
def test_other_policies_are_not_measured(reuse):
    driver = driver_for()
    for number in range(3):
        ask(driver, "abc", f"{number}?", reuse=reuse)
    work_off(driver)
    assert driver.engine.meter.tokens == 0


def test_auto_uses_the_result_and_keeps_it_after_a_restart(cache):
    driver = driver_for()
    asked = prompt("abc", "Secret?")
    assert str(driver.llm.policy_for(asked)) == "modular"
    for number in range(4):
        ask(driver, "abc", f"Secret {number}?")
    work_off(driver)
    assert str(driver.llm.policy_for(asked)) != "modular", "random weights diverge too much for the default tolerance"
    kept = Measurements.of(driver.llm.client.model.measured_as(None))
    assert [row.policy for row in kept.about(None)] == KEYS
    (file,) = cache.glob("checks/*.json")
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == [""]
    assert {type(value) for row in rows[""] for name, value in row.items() if name not in ("policy", "positions")} <= {
        *(int, float, type(None))
    }
    again = LLM(driver.loaded, kv_memory="4MiB", measure="auto", max_model_len=512)
    assert again.local.meter is None, "enough is known"
    again.schemas.add(SCHEMA, again.policy("modular"))
    assert again.policy_for(asked) == driver.llm.policy_for(asked)


def test_results_of_a_check_are_not_replaced():
    checked = Measured("modular", "packed", 1, 0.5, 1.0, 1.0, 1.0, 0.9, 0.0, 1.0)
    found = Measurements(bytes(32), None).with_rows(None, [checked])
    live = Measured("modular", "packed", 64, 0.1, 0.2, 1.0, None, None, 0.0, None)
    assert found.with_rows(None, [live]).about(None) == (checked,)
    assert Measurements(bytes(32), None).with_rows(None, [live]).about(None) == (live,)


@pytest.mark.parametrize("settings", [{"measure": "off"}, {"profile": "off"}, {"placeholders": "unk"}])
def test_measuring_is_off_without_auto(settings):
    assert LLM(tiny("llama"), **{"kv_memory": "4MiB", "measure": "auto", **settings}).local.meter is None


def test_invalid_setting_is_refused():
    with raises("parameter.unknown_choice", ParameterError, names="measure"):
        LLM(tiny("llama"), measure="some")
