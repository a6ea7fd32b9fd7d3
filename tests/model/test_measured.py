"""Measurements of a model are kept in a file for its fingerprint, and 'auto' follows them."""

from __future__ import annotations

import hashlib
import json
import logging
from itertools import permutations
from types import SimpleNamespace

import pytest

from inlay import LLM, Prompt, SamplingParams, Schema
from inlay.config import EngineConfig
from inlay.measured import VERSION, AutoReuse, Measurements
from inlay.policy import ReusePolicy
from inlay.tolerance import Measured
from tests.conftest import tiny
from tests.model.check.models import small_model

SCHEMA = Schema.from_string(
    '<schema name="s"><module name="a">Bravel is a town.</module><module name="b">Old.</module></schema>'
)
OTHER = Schema.from_string(
    '<schema name="s"><module name="a">Bravel is a river.</module><module name="b">Old.</module></schema>'
)
PROMPT = Prompt.from_string('<prompt schema="s"><a/><b/>Who?</prompt>')
MODEL = bytes(32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path))
    return tmp_path


def row(policy: str, kl_high: float, *, prompts: int = 10, recomputed: float = 0.0) -> Measured:
    return Measured(policy, "packed", prompts, kl_high / 2, kl_high, 1.0, 1.0, 0.9, recomputed, 1.0)


def test_kept_measurements_are_read_back():
    assert Measurements.of(MODEL).about(SCHEMA) == ()
    assert Measurements.of(MODEL).keep(None, [row("modular", 1.0)]) is None
    assert Measurements.of(MODEL).keep(SCHEMA, [row("modular", 0.1)]) is None
    found = Measurements.of(MODEL)
    assert found.about(SCHEMA) == (row("modular", 0.1),)
    assert found.about(None) == found.about(OTHER) == (row("modular", 1.0),)
    assert Measurements.of(bytes([1] * 32)).about(None) == ()


def test_measurement_of_fewer_prompts_does_not_replace_one_of_more():
    for each in (row("modular", 1.0, prompts=20), row("modular", 2.0, prompts=5), row("isolated", 3.0, prompts=5)):
        Measurements.of(MODEL).keep(None, [each])
    assert Measurements.of(MODEL).about(None) == (row("modular", 1.0, prompts=20), row("isolated", 3.0, prompts=5))
    Measurements.of(MODEL).keep(None, [row("modular", 0.5, prompts=20)])
    assert Measurements.of(MODEL).about(None)[0] == row("modular", 0.5, prompts=20)


def test_former_key_of_a_policy_is_read_as_its_present_one():
    Measurements.of(MODEL).keep(None, [row("modular+healing:off", 1.0)])
    assert Measurements.of(MODEL).about(None) == (row("modular+promote:off", 1.0),)


def damage(path, how: str) -> None:
    document = json.loads(path.read_text())
    if how == "cut":
        path.write_text(path.read_text()[:-20])
    elif how == "changed":
        document["rows"][""][0]["kl_high"] = 0.0
        path.write_text(json.dumps(document))
    elif how == "list":
        path.write_text("[]")
    else:
        path.write_bytes(b"\xff")


def test_modular_of_an_older_file_is_ignored():
    """Its modules were measured without a primer."""
    Measurements.of(MODEL).keep(None, [row("modular", 1.0), row("modular+linked:16", 0.5), row("anchored", 0.7)])
    path = Measurements.of(MODEL).path
    document = json.loads(path.read_text()) | {"version": 1}
    del document["sha256"]
    path.write_text(json.dumps({**document, "sha256": hashlib.sha256(json.dumps(document).encode()).hexdigest()}))
    found = Measurements.of(MODEL)
    assert found.problem is None
    assert found.about(None) == (row("anchored", 0.7),)
    assert found.keep(None, [row("modular", 0.1)]) is None
    assert Measurements.of(MODEL).about(None) == (row("anchored", 0.7), row("modular", 0.1))


@pytest.mark.parametrize("how", ["cut", "changed", "list", "bytes"])
def test_damaged_file_is_reported_and_ignored(how):
    Measurements.of(MODEL).keep(None, [row("modular", 1.0)])
    path = Measurements.of(MODEL).path
    damage(path, how)
    found = Measurements.of(MODEL)
    assert found.rows == {}
    assert found.problem == f"{path} is damaged and is ignored: what was measured is not known"
    assert found.keep(None, [row("modular", 2.0)]) is None  # in its place
    assert Measurements.of(MODEL).about(None) == (row("modular", 2.0),)


def test_damaged_file_is_replaced_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path / "of version 2"))
    Measurements.of(MODEL).keep(None, [row("modular", 1.0)])
    damage(Measurements.of(MODEL).path, "cut")
    assert Measurements.of(MODEL).keep(None, [row("modular", 2.0)]) is None
    assert Measurements.of(MODEL).about(None) == (row("modular", 2.0),)


def test_unreadable_file_is_logged_once_and_ignored(monkeypatch, caplog):
    Measurements.of(small_model().fingerprint).keep(None, [row("modular", 0.01)])
    path = Measurements.of(small_model().fingerprint).path

    def refused(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    for name in ("exists", "stat", "open"):
        monkeypatch.setattr(type(path), name, refused)
    problem = f"{path} cannot be read (Permission denied): what was measured is not known"
    found = Measurements.of(small_model().fingerprint)
    assert (found.rows, found.problem) == ({}, problem)
    auto = AutoReuse("small", SimpleNamespace(measured_as=lambda _: bytes(32), why_not_shift=None), EngineConfig())
    assert [str(auto.resolve(ReusePolicy.parse("auto"))) for _ in range(2)] == ["exact"] * 2
    assert len(logged(caplog)) == 1
    assert "cannot be read (Permission denied)" in logged(caplog)[0]


def test_newer_file_is_reported_and_kept():
    Measurements.of(MODEL).keep(None, [row("modular", 1.0)])
    path = Measurements.of(MODEL).path
    path.write_text(json.dumps({"version": VERSION + 1, "more": "than we know"}))
    before = path.read_bytes()
    found = Measurements.of(MODEL)
    assert (found.rows, f"is of version {VERSION + 1}, which this inlay does not know," in found.problem) == ({}, True)
    assert "newer inlay" in found.keep(None, [row("modular", 2.0)])
    assert path.read_bytes() == before


def test_file_of_another_model_is_ignored():
    Measurements.of(MODEL).keep(None, [row("modular", 1.0)])
    other = bytes([1] * 32)
    Measurements.of(MODEL).path.rename(Measurements.of(other).path)
    assert Measurements.of(other).rows == {}
    assert "is damaged" in Measurements.of(other).problem


def test_write_error_is_reported(cache):
    (cache / "checks").write_text("a file")
    assert "cannot be written" in Measurements.of(MODEL).keep(None, [row("modular", 1.0)])


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "inlay.measured"]


def test_auto_without_a_measurement_is_exact_and_logs_a_remedy_once(caplog):
    llm = LLM(small_model(), kv_memory="64MiB", reuse="auto")
    llm.add_schema(SCHEMA, encode=False)
    assert [llm.generate(PROMPT)[0].reuse for _ in range(2)] == ["exact"] * 2
    general, of_schema = logged(caplog)
    why = "nothing was measured on small; run 'inlay check small' once, with the same dtype and quantization"
    assert general == f"reuse 'auto:0.05' is 'exact': {why}"
    assert of_schema == f"reuse 'auto:0.05' is 'exact' for schema 's': {why}"


def test_auto_is_resolved_by_schema_and_tolerance(caplog):
    caplog.set_level(logging.INFO)
    known = Measurements.of(small_model().fingerprint)
    known.keep(None, [row("modular", 1.0), row("modular+linked:1", 0.04, recomputed=0.2)])
    known.keep(SCHEMA, [row("isolated", 0.01)])
    llm = LLM(small_model(), kv_memory="64MiB", reuse="auto", tolerance=0.05)
    llm.add_schema(SCHEMA)
    (output,) = llm.generate(PROMPT)
    assert (output.reuse, output.usage.isolated_tokens > 0) == ("isolated", True)
    assert llm.lay_out(PROMPT, reuse="auto").ids == output.prompt_token_ids
    assert llm.generate("Who?")[0].reuse == "exact"  # it has no modules
    assert llm.generate(PROMPT, reuse="modular")[0].reuse == "modular"
    llm.add_schema(OTHER, replace=True)
    assert llm.generate(PROMPT)[0].reuse == "modular+linked:1"
    assert llm.generate(PROMPT, reuse="auto:1")[0].reuse == "modular"
    assert llm.generate(PROMPT, reuse="auto:0.001")[0].reuse == "exact"
    assert llm.generate(PROMPT, reuse="auto:answers:0.9")[0].reuse == "modular"
    assert "reuse 'auto:0.05' is 'isolated' for schema 's': it was measured to be within 0.05 nats a token" in logged(
        caplog
    )


def test_auto_is_the_default_once_the_model_is_measured():
    llm = LLM(small_model(), kv_memory="64MiB")
    assert str(llm.policy_for(PROMPT)) == "modular"
    fingerprint = llm.client.model.measured_as(None)
    Measurements.of(fingerprint).keep(None, [row("primed", 0.01), row("isolated", 1.0)])
    llm = LLM(small_model(), kv_memory="64MiB")
    llm.add_schema(SCHEMA)
    assert [str(llm.policy_for(prompt)) for prompt in (PROMPT, "Plain text.")] == ["primed", "exact"]
    assert str(llm.policy_for(PROMPT, "isolated")) == "isolated"
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert (output.reuse, output.usage.primed_tokens > 0) == ("primed", True)
    fixed = LLM(small_model(), kv_memory="64MiB", reuse="modular")
    assert str(fixed.policy_for(PROMPT)) == "modular"


def test_private_schema_uses_its_own_measurement():
    Measurements.of(small_model().fingerprint).keep(OTHER, [row("modular", 0.01)])
    llm = LLM(small_model(), kv_memory="64MiB", reuse="auto")
    llm.add_schema(SCHEMA, encode=False)
    llm.add_schema(OTHER, encode=False, cache_salt="ann")
    assert llm.generate(PROMPT)[0].reuse == "exact"
    assert llm.generate(PROMPT, cache_salt="ann")[0].reuse == "modular"


def test_measurements_do_not_apply_to_other_approximations(caplog, tmp_path):
    Measurements.of(tiny("llama").fingerprint).keep(None, [row("modular", 0.01)])
    store = {"store": tmp_path / "store", "store_codec": "int8"}
    for settings, named in (({"placeholders": "unk"}, "placeholders 'unk'"), (store, "store_codec 'int8'")):
        caplog.clear()
        llm = LLM(tiny("llama"), kv_memory="64MiB", reuse="auto", **settings)
        assert str(llm.policy()) == "exact"
        assert logged(caplog) == [
            f"reuse 'auto:0.05' is 'exact': what is measured on a model does not hold with {named}"
        ]
        llm.shutdown()


@pytest.mark.parametrize(
    ("rows", "unprofiled"),
    [
        ([row("modular", 2.0)], "linked:2147483647"),
        ([row("modular", 2.0), row("modular+linked:16", 0.04, recomputed=0.5)], "linked:16"),
        ([row("modular+linked:16", 0.2), row("anchored+linked:16", 0.04, recomputed=0.5)], "linked:2147483647"),
    ],
)
def test_auto_without_profiles_uses_unprofiled_measurements_or_exact(rows, unprofiled):
    """An engine that makes none takes another policy; one that makes them answers modules without one so."""
    Measurements.of(tiny("llama").fingerprint).keep(None, [*rows, row("modular+profiled:0.1", 0.04, recomputed=0.1)])
    llm = LLM(tiny("llama"), kv_memory="4MiB", reuse="auto", tolerance=0.05)
    assert (str(llm.policy()), str(llm.policy().unprofiled)) == ("modular+profiled:0.1", unprofiled)
    llm.shutdown()
    without = LLM(tiny("llama"), kv_memory="4MiB", reuse="auto", tolerance=0.05, profile="off")
    within = [each.policy for each in rows if each.kl_high <= 0.05]
    assert str(without.policy()) == (within[0] if within else "exact")
    assert without.policy().unprofiled is None
    without.shutdown()


def test_auto_reads_a_message_part_exactly_until_it_is_profiled():
    """From its second request on it is encoded and profiled, where the engine finds time."""
    Measurements.of(tiny("llama").fingerprint).keep(None, [row("modular+profiled:0.1", 0.04, recomputed=0.1)])
    llm = LLM(tiny("llama"), kv_memory="8MiB", chunk_size=4, reuse="auto", tolerance=0.05, promotion_memory=0, seed=0)
    mark = {"cache_control": {"type": "ephemeral"}}
    texts = ("The first document says some words. ", "A second one has others. ", "And here is a third one. ")
    usages = []
    for number, order in enumerate(permutations(texts)):
        parts = [{"type": "text", "text": text} | mark for text in order]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": f"{number}?"}]}
        params = SamplingParams(temperature=0, max_tokens=1)
        (made,) = llm.generate([[asked]], params)
        usages.append(made.usage)
    assert [usage.module_tokens for usage in usages[:2]] == [0, 0]
    assert llm.stats().profiled_tokens > 0
    assert usages[-1].module_tokens > 0
    assert usages[-1].linked_tokens == 0, "it recomputes by profiles"
    llm.shutdown()
