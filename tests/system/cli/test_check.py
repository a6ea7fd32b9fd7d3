"""``inlay check``: its table, its JSON, the file that 'auto' uses, and one sentence for each error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from inlay.measured import Measurements
from tests.commands import run
from tests.model.check.models import save

pytestmark = pytest.mark.long

SCHEMA = """<schema name="trip"><module name="miami">Miami has beaches.
</module><module name="oslo">Oslo has fjords.
</module></schema>"""
PML = '<prompt schema="trip"><miami/><oslo/>Where?</prompt>'
WRITTEN = [json.dumps(PML), json.dumps({"pml": PML}), json.dumps({"schema": "trip", "content": ["Where to?"]})]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path / "cache"))
    (tmp_path / "trip.xml").write_text(SCHEMA)
    (tmp_path / "prompts.jsonl").write_text("\n".join(WRITTEN) + "\n")
    return tmp_path


OWN = ("--schema", "trip.xml", "--prompts", "prompts.jsonl", "--against", "exact,modular", "--quick")


def test_json_ends_with_the_result_and_auto_uses_it(model, capsys, files):
    status, out, _ = run(capsys, "check", model, *OWN, "--tolerance", "50", "--json")
    assert status == 0
    about, result = map(json.loads, out.splitlines())
    assert list(result) == ["rows", "recommended", "reason"]
    assert all(
        list(row) == ["policy", "prompts", "kl", "top1", "same_answers", "recomputed", "ttft_ms"]
        for row in result["rows"]
    )
    assert [row["policy"] for row in result["rows"]] == ["exact", "modular"]
    assert (result["recommended"], about["refused"], about["only_distributions"]) == ("modular", [], None)
    assert about["kinds"] == {"trip": {"prompts": 3, "schemas": 1}}
    kept = Measurements.of(bytes.fromhex(about["fingerprint"]))
    assert str(kept.path) == about["kept"]
    assert [row.policy for rows in kept.rows.values() for row in rows] == ["exact", "modular"]
    (files / "prompt.xml").write_text(PML)
    asked = ("run", "trip.xml", "--prompt", "prompt.xml", "--model", model, "--max-tokens", "1", "--json")
    for tolerance, taken in (("50", "modular"), ("0", "exact")):
        status, out, _ = run(capsys, *asked, "--reuse", "auto", "--tolerance", tolerance, "--store", "off")
        assert (status, json.loads(out)["reuse"]) == (0, taken)


def test_table_of_results(model, capsys):
    status, out, _ = run(capsys, "check", model, *OWN, "--tolerance", "0")
    assert status == 0
    assert "modules at other positions: yes, by turned query" in out
    assert "Compared with full prefill on 3 of trip, modules packed:" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("exact ", "modular "))] == [
        "exact",
        "modular",
    ]
    assert "Recommended: exact, as no policy that computes less is surely within 0 nats a token" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--prompts", "prompts.jsonl"), "prompts.jsonl:1: is no chat request"),
        (("--prompts", "unmarked.jsonl"), "unmarked.jsonl:1: no part is marked"),
        (("--prompts", "no-role.jsonl"), "no-role.jsonl:1: is no chat request"),
        (("--tolerance", "much"), "--tolerance much is not a tolerance"),
        (("--against", "auto"), "against names 'auto'"),
        (("--against", "modulr"), "--against: reuse='modulr' is not a reuse policy. Did you mean reuse='modular'?"),
        (("--seconds", "0"), "--seconds is 0"),
        (("--schema", "trip.xml", "--prompts", "empty.jsonl"), "empty.jsonl holds no prompts"),
        (("--schema", "trip.xml", "--prompts", "broken.jsonl"), "broken.jsonl:2: it is not JSON"),
        (("--schema", "trip.xml", "--prompts", "number.jsonl"), "number.jsonl:1: is no prompt"),
        (("--schema", "trip.xml", "--prompts", "other.jsonl"), "other.jsonl:1: the prompt is of schema 'x'"),
        (("--schema", "trip.xml", "--prompts", "wrong.jsonl"), "wrong.jsonl:1"),
        (("--schema", "trip.xml", "--prompts", "none.jsonl"), "none.jsonl"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_model_is_loaded(arguments, told, capsys, files):
    (files / "empty.jsonl").write_text("\n")
    (files / "broken.jsonl").write_text(f"{WRITTEN[0]}\n{{\n")
    (files / "number.jsonl").write_text("3\n")
    (files / "unmarked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Where?"}]}))
    (files / "no-role.jsonl").write_text(json.dumps({"messages": [{"content": "Where?"}]}))
    (files / "other.jsonl").write_text(json.dumps('<prompt schema="x">a</prompt>'))
    (files / "wrong.jsonl").write_text(json.dumps('<prompt schema="trip"><paris/></prompt>'))
    status, out, err = run(capsys, "check", "no-such-folder/no-such-model/at-all", *arguments)
    assert (status, out) == (2, "")
    assert told in err


def test_damaged_file_is_reported_and_rewritten(model, capsys):
    status, out, _ = run(capsys, "check", model, *OWN, "--json")
    path = json.loads(out.splitlines()[0])["kept"]
    with open(path, "a", encoding="utf-8") as file:
        file.write("x")
    status, _, err = run(capsys, "check", model, *OWN, "--json")
    assert (status, f"{path} is damaged and is ignored" in err) == (0, True)
    status, _, err = run(capsys, "check", model, *OWN, "--json")
    assert (status, "damaged" in err) == (0, False)


def test_marked_chats_are_compared_without_a_schema(model, capsys, files):
    marked = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": f"Town {town} lies by the sea. ", **marked} for town in ("Ayr", "Ely")]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Where?"}]}]
    requests = [{"messages": messages}, {"body": {"messages": messages}}, messages]
    (files / "chats.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    status, out, _ = run(
        capsys, "check", model, "--prompts", "chats.jsonl", "--against", "exact,modular,primed", "--json"
    )
    assert status == 0
    about, result = map(json.loads, out.splitlines())
    assert about["kinds"] == {"messages": {"prompts": 3, "schemas": 1}}
    rows = {row["policy"]: row for row in result["rows"]}
    assert rows["exact"]["kl"] < 1e-5 < min(rows["modular"]["kl"], rows["primed"]["kl"])
    assert (rows["modular"]["recomputed"], rows["primed"]["recomputed"]) == (0, 0)
    assert rows["modular"]["kl"] == rows["primed"]["kl"]
    kept = Measurements.of(bytes.fromhex(about["fingerprint"]))
    assert [row.policy for row in kept.about(None)] == ["exact", "modular", "primed"]


def test_prompts_left_out_by_the_time_limit_are_reported(model, capsys, files):
    (files / "prompts.jsonl").write_text("\n".join([WRITTEN[0]] * 9))
    status, _, err = run(capsys, "check", model, *OWN, "--seconds", "0.001")
    assert (status, "1 of 9 prompts were compared in 0.001 seconds; --seconds gives" in err) == (0, True)
    assert "inlay: no time was left to compare exact" in err
    assert "'auto' will not know of this: it ended before every policy was compared" in err


def test_termination_prints_results_so_far(model, files):
    (files / "prompts.jsonl").write_text("\n".join([WRITTEN[0]] * 400))
    words = [sys.executable, "-m", "inlay", "check", model, *OWN, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as check:
        for line in check.stderr:
            if "comparing answers: " in line:
                break
        check.terminate()
        out, err = check.communicate(timeout=120)
    assert check.returncode == 130, err
    about, result = map(json.loads, out.splitlines())
    assert (about["kept"], "it was interrupted" in err) == (None, True)
    assert all(row["prompts"] >= 1 for row in result["rows"])


def test_quick_check_is_not_used_by_auto(model, capsys, files):
    status, out, err = run(capsys, "check", model, "--quick", "--seconds", "0.001", "--against", "modular", "--json")
    assert (status, json.loads(out.splitlines()[0])["kept"]) == (0, None)
    assert "'auto' will not know of this: --quick asks too little of generated prompts" in err
    assert not list(files.glob("cache/checks/*"))
