"""The command line: its output, and one sentence with an exit status for each error."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inlay.cli.main import main
from tests.commands import pipe, run

SCHEMA = """<schema name="s">
  Always here.
  <module name="a">The first module of them all.</module>
  <module name="b">Second, with <param name="p" len="8"/> in it.</module>
</schema>
"""
PROMPT = '<prompt schema="s"><a/><b p="it"/>And now?</prompt>'


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.xml").write_text(SCHEMA)
    (tmp_path / "p.xml").write_text(PROMPT)
    return tmp_path


def test_missing_package_gives_one_sentence(files, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "inlay.cli.sources", raising=False)
    monkeypatch.setitem(sys.modules, "pydantic_settings", None)  # a dependency that came after the installation
    status, out, err = run(capsys, "config", "show")
    assert (status, out) == (2, "")
    assert "'pydantic_settings'" in err
    assert "Traceback" not in err


def test_run_prints_the_answer_and_a_table(files, capsys):
    status, out, _ = run(capsys, "run", "s.xml", "--prompt", "p.xml", "--max-tokens", "5")
    assert status == 0
    assert "tokens cached" in out
    assert "modular, packed" in out


def test_run_json(files, capsys):
    arguments = ["--model", "random:tiny", "--max-tokens", "5", "--json", "--compare"]
    status, out, err = run(capsys, "run", "s.xml", "--prompt", "p.xml", *arguments)
    assert status == 0
    row = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1
    for each in (row, row["baseline"]):
        assert {
            "text",
            "token_ids",
            "prompt_tokens",
            "cached_tokens",
            "computed_tokens",
            "ttft_ms",
            "model",
            "reuse",
            "positions",
        } <= set(each)
        assert each["cached_tokens"] + each["computed_tokens"] == each["prompt_tokens"]
    assert (row["reuse"], row["positions"], row["model"]) == ("modular", "packed", "random:tiny")
    assert row["computed_tokens"] == len("it") + len("And now?")
    forms = ("exact_tokens", "scaffold_tokens", "anchored_tokens", "isolated_tokens")
    assert sum(row[form] for form in forms) == row["cached_tokens"]
    assert row["promoted_tokens"] == 0
    assert (row["baseline"]["reuse"], row["baseline"]["cached_tokens"]) == ("off", 0)
    assert "random weights" in err


def test_run_prints_the_order_of_sets(files, capsys):
    (files / "two.xml").write_text(
        '<schema name="two"><module name="a">One.</module><module name="b">Two.</module></schema>'
    )
    (files / "q.xml").write_text('<prompt schema="two"><set><b/><a/></set>Well?</prompt>')
    arguments = ["run", "two.xml", "--prompt", "q.xml", "--model", "random:tiny", "--max-tokens", "1"]
    status, out, _ = run(capsys, *arguments, "--json", "--compare")
    assert status == 0
    row = json.loads(out)
    assert row["order"] == [{"members": ["b", "a"]}]
    assert row["baseline"]["order"][0]["why_fixed"] == "reuse 'off' is the same whatever is stored"
    status, out, _ = run(capsys, *arguments, "--reuse", "anchored")
    assert status == 0
    assert "(order: b, a; it was not free: reuse 'anchored' is the same whatever is stored)" in out


def test_run_prints_recomputed_tokens(files, capsys):
    arguments = ["run", "s.xml", "--prompt", "p.xml", "--model", "random:tiny", "--max-tokens", "1", "--reuse"]
    _, out, _ = run(capsys, *arguments, "modular+profiled:0.2", "--profile", "off", "--json")
    row = json.loads(out)
    recomputed = row["recomputed_tokens"]
    assert (row["linked_tokens"], row["module_tokens"]) == (recomputed, row["cached_tokens"] - row["exact_tokens"])
    lines = {
        "modular+profiled:0.2": f"(recomputed: {recomputed} tokens of modules, of which {recomputed} are the first "
        "ones of ",
        "anchored+linked:2": "(recomputed: 4 tokens of modules)\n",
    }
    for policy, line in lines.items():
        _, out, _ = run(capsys, *arguments, policy, "--profile", "off")
        assert line in out
    _, out, _ = run(capsys, *arguments, "modular")
    assert "(recomputed" not in out


def test_run_reads_a_prompt_from_standard_input(files, capsys, monkeypatch):
    pipe(monkeypatch, PROMPT)
    status, out, _ = run(capsys, "run", "s.xml", "--prompt", "-", "--max-tokens", "2", "--json")
    assert status == 0
    assert json.loads(out)["cached_tokens"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reuse", ["off", "exact", "isolated", "anchored"])
@pytest.mark.parametrize("positions", ["schema", "packed"])
def test_every_policy(files, capsys, reuse, positions):
    arguments = ["--reuse", reuse, "--positions", positions, "--max-tokens", "2", "--json"]
    status, out, _ = run(capsys, "run", "s.xml", "--prompt", "p.xml", *arguments)
    assert status == 0
    assert (json.loads(out)["reuse"], json.loads(out)["positions"]) == (reuse, positions)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run none.xml --prompt p.xml", "none.xml: no such file"),
        ("run s.xml --prompt none.xml", "none.xml: no such file"),
        ("run s.xml", "s.xml is taken as a schema; name its prompt with --prompt FILE"),
        ("run s.xml --prompt p.xml --gpu", "No such option: --gpu"),
        ("run s.xml --prompt p.xml --reuse much", "--reuse much is not a reuse policy. Use one of off, exact"),
        ("run s.xml --prompt p.xml --positions loose", "positions is 'loose'; use one of schema, packed"),
        ("run s.xml --prompt p.xml --max-tokens 0", "--max-tokens is 0; it must be"),
        ("run s.xml --prompt p.xml --max-tokens many", "Invalid value for '--max-tokens'"),
        ("run s.xml --prompt p.xml --temperature -1", "temperature is -1.0; it must be"),
        ("run s.xml --prompt p.xml --model ./nowhere", "./nowhere: no such directory"),
        ("run s.xml --prompt p.xml --model random:x", "random:x is not a known shape"),
        ("run s.xml --prompt p.xml --dtype int4", "dtype is 'int4'"),
        ("run p.xml --prompt p.xml", "p.xml:1:1: "),
        ("schema show none.xml", "none.xml: no such file"),
        ("schema show s.xml --model ./nowhere", "./nowhere: no such directory"),
        ("schema look s.xml", "No such command 'look'"),
        ("bench ttft --model demo --cached many", "--cached is 'many'; write a number"),
        ("bench ttft --model demo --cached 2", "at least 8 cached tokens"),
        ("bench ttft --model demo --cached 100000", "do not fit the model's context of 4096"),
        ("bench ttft --model demo --baselines vllm", "baseline is 'vllm'; use one of transformers, llama.cpp"),
        ("bench ttft --model demo --reuse off", "reuse is 'off', and cached modules are timed; use isolated"),
        ("reserve", "No such command 'reserve'"),
    ],
)
def test_errors_are_one_sentence(files, capsys, arguments, sentence):
    before = sorted(files.iterdir())
    status, out, err = run(capsys, *arguments.split())
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("inlay: ")
    assert "Traceback" not in err + out
    assert sorted(files.iterdir()) == before


@pytest.mark.parametrize(
    ("schema", "prompt", "sentence"),
    [
        ("<schema>", PROMPT, "s.xml:1:"),
        (SCHEMA, '<prompt schema="s"><c/></prompt>', "p.xml:1:20: "),
        (
            SCHEMA,
            '<prompt schema="s"><b p="much too long"/>?</prompt>',
            "is 13 tokens long and its len is 8; shorten it",
        ),
        (SCHEMA, f'<prompt schema="s">{"word " * 2000}</prompt>', "inlay: p.xml:1:9: the prompt ends at position 10"),
    ],
)
def test_invalid_files_are_one_sentence(files, capsys, schema, prompt, sentence):
    (files / "s.xml").write_text(schema)
    (files / "p.xml").write_text(prompt)
    status, out, err = run(capsys, "run", "s.xml", "--prompt", "p.xml", "--model", "random:tiny")
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert not out.strip()


def test_schema_check(files, capsys):
    (files / "bad.xml").write_text('<schema name="x"><modul name="a">x</modul>\n<param name="p" len="0"/></schema>')
    assert run(capsys, "schema", "check", "s.xml")[:2] == (0, "s.xml: ok, schema 's' with 2 modules\n")
    status, out, err = run(capsys, "schema", "check", "bad.xml", "s.xml", "none.xml")
    assert status == 1
    assert "s.xml: ok" in out
    assert [line.split(": ")[0] for line in err.splitlines()][:2] == ["bad.xml:1:18", "bad.xml:2:1"]
    assert err.splitlines()[-1].startswith("none.xml: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('<param name="p" len="2" default="a long default of many words"/>', "the default of 'p' is"),
        ('<param name="p" len="2" scaffold="a long scaffold of many words"/>', "the scaffold of 'p' is"),
    ],
)
def test_schema_check_counts_defaults(files, capsys, body, message):
    (files / "long.xml").write_text(f'<schema name="x"><module name="a">For {body} days.</module></schema>')
    status, out, err = run(capsys, "schema", "check", "long.xml", "s.xml", "--model", "random:tiny")
    assert (status, out) == (1, "s.xml: ok, schema 's' with 2 modules\n")
    assert err.startswith(f"long.xml:1:39: {message} ")
    assert "tokens long and its len is 2; write len=" in err
    assert "(tokens of random:tiny; --model takes another one)" in err
    longer = body.replace("2", "40", 1)
    (files / "long.xml").write_text(f'<schema name="x"><module name="a">For {longer}.</module></schema>')
    assert run(capsys, "schema", "check", "long.xml", "--model", "random:tiny")[0] == 0


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("{{ city }}", '<param name="city" len="…"/>'),
        ("{{city}}", '<param name="city" len="…"/>'),
        ("{{- city | upper -}}", '<param name="city" len="…"/>'),
        ("{{{user.name}}}", '<param name="user.name" len="…"/>'),
        ("{{ items[0] }}", '<param name="name" len="…"/>'),
    ],
)
def test_schema_check_warns_of_variables_of_other_languages(files, capsys, written, remedy):
    (files / "v.xml").write_text(f'<schema name="x">Hello.\n<module name="a">Go to {written}!</module></schema>')
    status, out, err = run(capsys, "schema", "check", "v.xml")
    assert (status, out) == (0, "v.xml: ok, schema 'x' with 1 module\n")
    assert err.startswith("v.xml:2:18: warning: {{")
    assert f"stays text as it is, and nothing fills it; write {remedy}, in a module" in err
    status, out, _ = run(capsys, "schema", "lint", "v.xml", "--model", "random:tiny")
    assert "v.xml:2:18: template-variable: {{" in out


@pytest.mark.parametrize("text", ['{"a": {"b": 1}}', "{ city }", "f(x) = {{}}", "{{ }}"])
def test_other_braces_are_text(files, capsys, text):
    (files / "v.json").write_text(json.dumps({"name": "x", "content": [{"module": "a", "content": [text]}]}))
    assert run(capsys, "schema", "check", "v.json") == (0, "v.json: ok, schema 'x' with 1 module\n", "")


def test_schema_check_of_json_shows_a_parameter_of_json(files, capsys):
    (files / "v.json").write_text(json.dumps({"name": "x", "content": [{"module": "a", "content": ["{{ city }}"]}]}))
    assert 'write {"param": "city", "len": …}, in a module' in run(capsys, "schema", "check", "v.json")[2]


@pytest.mark.parametrize("tag", ["tool", "tools", "function", "functions", "Tool"])
def test_tools_are_not_looked_for_in_schemas(files, capsys, tag):
    (files / "t.xml").write_text(f'<schema name="x"><{tag} name="weather"/></schema>')
    status, _, err = run(capsys, "schema", "check", "t.xml")
    assert (status, "<module name=" in err) == (1, False)
    assert 'a request gives tools beside its messages, as "tools": […]' in err


def test_schema_show_json(files, capsys):
    status, out, _ = run(capsys, "schema", "show", "s.xml", "--model", "random:tiny", "--json")
    assert status == 0
    tree = json.loads(out)
    assert tree["end"] == len("Always here.\n") + len("The first module of them all.") + len("Second, with ") + 8 + 7
    kinds = [(child["kind"], child["name"]) for child in tree["children"]]
    assert kinds == [("text", "Always here."), ("module", "a"), ("module", "b")]
    b = tree["children"][2]
    assert [(c["kind"], c["end"] - c["start"]) for c in b["children"]] == [("text", 13), ("parameter", 8), ("text", 7)]
    assert (b["start"], b["end"], b["tokens"]) == (42, 70, 20)


def test_schema_show_prints_deviations_of_modules(files, capsys):
    status, out, _ = run(capsys, "schema", "show", "s.xml", "--model", "random:tiny", "--profile", "--json")
    assert status == 0
    modules = [node for node in json.loads(out)["children"] if node["kind"] == "module"]
    assert [set(node) >= {"deviation", "sensitivity"} for node in modules] == [True] * len(modules)
    assert modules
    _, out, _ = run(capsys, "schema", "show", "s.xml", "--model", "random:tiny", "--profile")
    assert "depends on others by 0." in " ".join(out.split())


def test_schema_show_draws_a_tree(files, capsys):
    status, out, _ = run(capsys, "schema", "show", "s.xml", "--model", "random:tiny")
    assert status == 0
    assert "module b" in out
    assert "positions 42…69" in out


@pytest.mark.long
def test_bench_ttft(files, capsys):
    arguments = ["--model", "random:tiny", "--cached", "64,128", "--new", "8", "--runs", "2", "--json"]
    status, out, _ = run(capsys, "bench", "ttft", *arguments)
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert [(row["cached"], row["new"]) for row in result["rows"]] == [(64, 8), (128, 8)]
    for row in result["rows"]:
        assert row["speedup"] == pytest.approx(row["full_prefill_ms"] / row["ttft_ms"], rel=0.01)
        assert row["over_bound"] == pytest.approx(row["ttft_ms"] / row["bound_ms"], rel=0.01)
    assert result["machine"]["threads"] >= 1


def test_version_and_help(capsys):
    import inlay

    assert run(capsys, "--version")[:2] == (0, f"inlay {inlay.__version__}\n")
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(command in out for command in ("run", "schema", "bench"))
    assert run(capsys)[0] == 0


def test_checking_a_schema_does_not_wait_for_torch(files):
    code = (
        "import sys; from inlay.cli.main import main; main(['schema', 'check', 's.xml']); print('torch' in sys.modules)"
    )
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=files, check=True)
    assert result.stdout.splitlines()[-1] == "False"
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize("command", [["chat", "./nowhere"], ["run", "./nowhere", "Who?"], ["chat", "./nowhere.gguf"]])
def test_a_missing_model_is_reported_before_torch_is_loaded(files, command):
    code = f"import sys; from inlay.cli.main import main; print(main({command}), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=files, check=True)
    assert result.stdout.splitlines()[-1] == "2 False"
    assert "./nowhere" in result.stderr


def test_chat_without_a_model_names_the_bundled_one(capsys):
    status, _, err = run(capsys, "chat")
    assert (status, "inlay chat demo" in err) == (2, True)


@pytest.mark.parametrize("command", [["run", "notes.txt", "Who?"], ["chat", "notes.txt"]])
def test_document_instead_of_a_model_is_reported(files, capsys, command):
    (files / "notes.txt").write_text("Bravel is a town.")
    status, _, err = run(capsys, *command)
    assert (status, "--document notes.txt" in err) == (2, True)


@pytest.mark.long
def test_the_benchmark_file_is_the_command():
    file = Path(__file__).parents[3] / "lab" / "benchmarks" / "ttft.py"
    words = [sys.executable, str(file), "--model", "random:tiny", "--cached", "64", "--new", "8", "--runs", "1"]
    words.append("--json")
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.splitlines()[-1])["rows"][0]["cached"] == 64


def test_run_rejects_an_invalid_prompt_before_loading_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inlay.client.llm.LLM", None)
    schema, prompt = tmp_path / "s.xml", tmp_path / "p.xml"
    schema.write_text('<schema name="s"><module name="m">text</module></schema>')
    prompt.write_text('<prompt schema="s"><n/></prompt>')
    assert main(["run", str(schema), "--prompt", str(prompt)]) == 2
    assert 'schema "s" has no module "n"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("serve", ""), "the argument behind 'serve' is empty"),
        (("serve", "--model", ""), "the value of --model is empty"),
        (("serve", "--model="), "the value of --model is empty"),
        (("run", "", "--prompt", "x"), "the argument behind 'run' is empty"),
        (("schema", "check", "a.xml", " "), "the argument behind 'a.xml' is empty"),
        (("",), "the argument behind 'inlay' is empty"),
    ],
)
def test_empty_arguments_are_refused(capsys, arguments, what):
    """An unset variable often produces one, which would mean a default or the working folder."""
    assert run(capsys, *arguments) == (2, "", f"inlay: {what}; give it a value, or leave it out\n")
