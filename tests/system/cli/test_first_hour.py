"""Mistakes of new users on the command line: the same options everywhere, and one sentence for each error."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import AddedToken

from inlay.cli.main import main
from inlay.errors import ParameterError
from inlay.models.load import MODEL_DIRECTORY, load_tokenizer
from tests.commands import pipe

SCHEMA = '<schema name="s"><user><module name="a">Bravel is a town. Its mayor is Rosa Tilen. </module></user></schema>'
PROMPT = '<prompt schema="s"><a/>Who is the mayor?</prompt>'


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "s.xml").write_text(SCHEMA)
    (tmp_path / "p.xml").write_text(PROMPT)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "p.xml", "--prompt", "p.xml"],
            "p.xml:1:1: this is a prompt, of schema 's'; give that schema's file here",
        ),
        (["schema", "show", "p.xml"], "p.xml:1:1: this is a prompt, of schema 's'; give that schema's file here"),
        (["run", "s.xml", "--prompt", "s.xml"], "s.xml:1:1: this is the schema 's', and --prompt takes a prompt of it"),
        (
            ["run", "s.xml", "--prompt", "Who?"],
            "Who?: no such file; --prompt takes a file that holds a prompt, such as",
        ),
        (
            ["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "0"],
            "--max-tokens is 0; it must be a whole number",
        ),
        (["serve", "demo", "--model", "other"], "MODEL is demo and --model is other; give one of them"),
    ],
)
def test_confused_arguments_are_explained(files, capsys, arguments, sentence):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"inlay: {sentence}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["schema check", "schema lint", "schema show", "cache warm", "batch in out --schema"]
)
@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (PROMPT, "this is a prompt, of schema 's'; give that schema's file here (inlay run takes both: SCHEMA"),
        ("<prompt><a/><user/>?</prompt>", "this is a prompt; give that schema's file here (inlay run takes both"),
    ],
)
def test_prompt_instead_of_a_schema_is_explained(files, capsys, command, prompt, sentence):
    (files / "p.xml").write_text(prompt)
    assert main([*command.split(), "p.xml"]) in (1, 2)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.removeprefix("inlay: ").startswith(f"p.xml:1:1: {sentence}")


def test_schema_instead_of_a_prompt_is_explained(files, capsys):
    for arguments in (["schema", "lint", "s.xml", "--prompts", "s.xml"], ["run", "s.xml", "--prompt", "s.xml"]):
        assert main(arguments) == 2
        assert f"this is the schema 's', and {arguments[-2]} takes a prompt of it; write" in capsys.readouterr().err
    (files / "bad.xml").write_text('<schema name="b"><modul/></schema>')
    assert main(["run", "s.xml", "--prompt", "bad.xml"]) == 2
    assert "bad.xml:1:1: this is a schema, and --prompt takes a prompt of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("schema check FOLDER", "is a folder; name a file in it"),
        ("schema lint LATIN", "is not UTF-8; save it as UTF-8"),
        ("schema lint s.xml --prompts FOLDER", "is a folder; name a file in it"),
        ("schema from-prompts FOLDER", "cannot be read (Is a directory); check the path"),
        ("run s.xml --prompt LATIN", "is not UTF-8; save it as UTF-8"),
        ("run s.xml --prompt FOLDER", "is a folder; name a file in it"),
        ("run s.xml --prompt p.xml --chat-template LATIN", "is not UTF-8; save it as UTF-8"),
        (
            "run s.xml --prompt p.xml --chat-template FOLDER",
            "cannot be read (Is a directory); give a file that you may",
        ),
        ("convert FOLDER", "is a folder; name a file in it"),
        ("program show FOLDER:p", "is a folder; name a file in it"),
        ("program show LATIN:p", "is not UTF-8; save it as UTF-8"),
        ("batch FOLDER out", "is no regular file, and must be read twice; write the requests to a file"),
        ("cache import FOLDER --store store", "give a file of inlay cache export"),
        ("keys list --file FOLDER", "cannot be read (Is a directory); check the path"),
        ("serve --ssl-certfile LATIN", "check the files, which are PEM"),
    ],
)
def test_unreadable_files_are_one_sentence(files, capsys, arguments, remedy):
    (files / "folder").mkdir()
    (files / "latin").write_bytes(b"\xe9t\xe9\n")
    arguments = arguments.replace("FOLDER", "folder").replace("LATIN", "latin")
    assert main([*arguments.split()]) in (1, 2)
    *_, told = capsys.readouterr().err.splitlines()  # after the end of a progress bar
    assert told.startswith(("inlay: ", "folder: ", "latin:"))
    assert remedy in told


def test_files_refused_by_the_system_are_one_sentence(files, capsys, monkeypatch):
    """Any command may read a bad file. This message also covers errors without one of their own."""

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied", "mine/s.xml")

    monkeypatch.setattr("inlay.pml.schema.document_from_file", refuse)
    assert main(["schema", "check", "s.xml"]) == 2
    told = "inlay: mine/s.xml: permission denied; check the path, and who may read and write there\n"
    assert capsys.readouterr().err == told


def test_standard_input_without_utf8_is_rejected(files, capsys, monkeypatch):
    pipe(monkeypatch, b"\xe9")
    assert main(["run", "s.xml", "--prompt", "-"]) == 2
    assert capsys.readouterr().err == "inlay: <stdin>: is not UTF-8; send the prompt as UTF-8\n"


def test_a_folder_below_home_is_found(files, capsys):
    assert main(["schema", "check", "~/s.xml"]) == 0
    assert f"{files}/s.xml: ok" in capsys.readouterr().out
    assert main(["run", "s.xml", "--prompt=~/p.xml", "--model", "~/none"]) == 2
    assert f"{files}/none: no such directory" in capsys.readouterr().err


BENCHMARKS = ["bench ttft", "bench encode", "bench decode", "bench throughput"]


@pytest.mark.parametrize("command", ["run", "serve", "batch", "cache warm", "eval modular-qa", *BENCHMARKS])
def test_commands_take_the_same_options_of_models(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    for option in ("--model", "--dtype", "--weights", "--quantization"):
        assert option in said, option


@pytest.mark.parametrize(
    ("options", "key"),
    [
        *((("--reuse", word), word) for word in ("off", "exact", "isolated", "anchored", "modular")),
        (("--reuse", "modular", "--no-promote"), "modular+promote:off"),
        (("--recompute", "linked:3"), "modular+linked:3"),
        (("--find", "content"), "modular+content+profiled:0.1"),
        (("--reuse", "anchored", "--recompute", "linked:3", "--across-adapters"), "anchored+across+linked:3"),
    ],
)
def test_policy_options_are_combined(files, capsys, options, key):
    assert main(["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "1", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["reuse"] == key
    assert "deprecated" not in err


def test_a_glued_policy_is_deprecated(files, capsys):
    assert (
        main(["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "1", "--reuse", "modular+linked:3", "--json"]) == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out)["reuse"] == "modular+linked:3"
    told = "inlay: --reuse modular+linked:3 is deprecated. Write --reuse modular --recompute linked:3."
    assert err.splitlines().count(told) == 1


@pytest.mark.parametrize("command", [["run", "s.xml", "--prompt", "p.xml"], ["serve", "demo"], ["check", "demo"]])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--reuse", "linked:3"], "--reuse linked:3 has no base policy. Write --reuse modular --recompute linked:3."),
        (["--reuse", "modular+linked:3", "--recompute", "linked:4"], "--recompute linked:4 both set recompute."),
        (["--reuse", "exact", "--recompute", "linked:4"], "--recompute linked:4 needs modules"),
        (["--reuse", "anchored", "--no-promote"], "--no-promote has no effect"),
    ],
)
def test_invalid_policy_options_are_rejected(files, capsys, command, options, sentence):
    assert main([*command, *options]) == 2
    assert sentence in capsys.readouterr().err


def test_two_tolerances_are_rejected(files, capsys):
    command = ["run", "s.xml", "--prompt", "p.xml", "--reuse", "auto:0.1", "--tolerance", "0.2"]
    assert main(command) == 2
    assert "--reuse auto:0.1 and --tolerance 0.2 both set tolerance" in capsys.readouterr().err


def test_model_notice_is_printed_once(files, capsys):
    assert main(["run", "s.xml", "--prompt", "p.xml", "--max-tokens", "1", "--compare"]) == 0
    err = capsys.readouterr().err
    assert err.count("demo is a small model") == 1
    assert len(err.splitlines()) == 1, "and nothing else but that"


def test_nested_unions_are_counted_like_outer_ones(files, capsys):
    (files / "n.xml").write_text(
        '<schema name="n"><module name="o"><union><module name="x">one</module><module name="y">two and three</module>'
        '</union></module><union><module name="p">four<union><module name="r">five</module></union></module>'
        '<module name="q">six</module></union></schema>'
    )
    assert main(["schema", "show", "n.xml", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    inner, outer = tree["children"][0]["children"][0], tree["children"][1]
    assert (inner["kind"], outer["kind"]) == ("union", "union")
    assert inner["tokens"] + outer["tokens"] == tree["tokens"]


def test_counting_commands_accept_any_tokenizer(files, capsys):
    folder = files / "other"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIRECTORY / name, folder)
    for config in (None, {"model_type": "mamba"}):
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        for command in ("show", "lint"):
            assert main(["schema", command, "s.xml", "--model", str(folder)]) == 0, capsys.readouterr().err


def test_tokenizer_larger_than_the_model_is_one_sentence(files, capsys):
    folder = files / "resized"
    shutil.copytree(MODEL_DIRECTORY, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken("<|mine|>", special=True)])
    tokenizer.chat_template = "<|mine|>" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    assert main(["run", "s.xml", "--prompt", "p.xml", "--model", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "'<|mine|>'" in err
    assert "the tokenizer does not belong to this model" in err
    assert "Traceback" not in err


def test_lookup_on_the_hub_is_announced(files, capsys, monkeypatch):
    def refuse(name, *arguments, **options):
        raise ParameterError(f"{name} is not to be had")

    monkeypatch.setattr("inlay.models.load.load_tokenizer", refuse)
    assert main(["schema", "show", "s.xml", "--model", "some/name"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "inlay: some/name is no folder here; it is looked up on the Hugging Face hub",
        "inlay: some/name is not to be had",
    ]
    for local in ("demo", "random:tiny", "./none", "."):
        assert main(["schema", "show", "s.xml", "--model", local]) == 2
        assert "hub" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["memory --model", "models show", "bench ttft --model", "bench throughput --quick --model"]
)
def test_every_command_announces_waiting_for_the_hub(files, capsys, monkeypatch, command):
    def silent(name, *arguments, **options):
        assert "some/name is no folder here; it is looked up on the Hugging Face hub" in capsys.readouterr().err
        try:
            raise LocalEntryNotFoundError("no answer")
        except LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect") from error

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", silent)
    assert main([*command.split(), "some/name"]) == 2
    assert capsys.readouterr().err == (
        "inlay: some/name is neither a local directory nor a model that the hub would give: it is not on this machine "
        "and the hub cannot be reached; run `inlay pull` where it can, and copy the folder that it prints, or use "
        "'demo'\n"
    )


def test_hub_is_not_announced_if_it_is_not_used(files, capsys, monkeypatch):
    assert main(["memory", "--model", "llama-2-7b", "--model", "llama-3.2-1b"]) == 0
    assert "hub" not in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in ("memory --model some/name", "schema show s.xml --model some/name"):
        assert main(command.split()) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert "is not on this machine and the hub cannot be reached; run `inlay pull` where it can" in told


def test_nested_modules_are_shown_by_their_paths(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (files / "n.xml").write_text(
        '<schema name="n"><module name="age"><union><module name="default">any</module><module name="old">80</module>'
        '</union></module><module name="job"><module name="default">none</module></module></schema>'
    )
    assert main(["schema", "show", "n.xml", "--model", "random:tiny"]) == 0
    said = capsys.readouterr().out
    assert [word for line in said.splitlines() for word in line.split("module ")[1:]] == [
        f"{path}  {rest}"
        for path, rest in (
            ("age", "0 tokens, positions 0…2"),
            ("age/default", "3 tokens, positions 0…2"),
            ("age/old", "2 tokens, positions 0…1"),
            ("job", "0 tokens, positions 3…6"),
            ("job/default", "4 tokens, positions 3…6"),
        )
    ]
    assert main(["schema", "show", "n.xml", "--model", "random:tiny", "--profile", "--json"]) == 0
    age = json.loads(capsys.readouterr().out)["children"][0]["children"][0]["children"]
    assert [(module["name"], module["deviation"] >= 0) for module in age] == [
        ("age/default", True),
        ("age/old", True),
    ]


def test_help_names_the_extra_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["eval", "modular-qa", "--help"]) == 0
    assert "inlay-llm[plots]" in capsys.readouterr().out


def test_batch_with_failures_names_the_output_file(files, capsys):
    (files / "in.jsonl").write_text("hello\n")
    assert main(["batch", "in.jsonl", "out.jsonl"]) == 1
    said = capsys.readouterr()
    failed = "inlay: 1 of 1 requests failed; out.jsonl says why, line by line; --retry-failed answers them again"
    assert failed in said.err.splitlines()
    assert json.loads(said.out)["failed"] == 1
