"""Settings from flags, the environment and a file: their order, their origins, and mistakes in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.cli.declared import GROUPS, known_settings
from inlay.cli.settings import Options
from inlay.cli.sources import unknown_variables, values_of
from inlay.config import EngineConfig, ModelSettings
from inlay.errors import ParameterError
from inlay.server.settings import ServerSettings
from inlay.settings import COMMANDS, settings_of
from tests.commands import run
from tests.raising import raises


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "inlay.toml"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables that other tests run with."""
    monkeypatch.delenv("INLAY_STORE")


def test_flags_precede_environment_file_and_defaults(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('port = 1\nhost = "file"\ntimeout = 5\n')
    monkeypatch.setenv("INLAY_PORT", "2")
    monkeypatch.setenv("INLAY_HOST", "environment")
    found = values_of("serve", {"port": 3, "drain": None}, file)
    said = {key: (found[key].value, found[key].origin) for key in ("port", "host", "timeout", "drain")}
    assert said == {
        "port": (3, "--port"),
        "host": ("environment", "INLAY_HOST"),
        "timeout": (5.0, f"{file}:3"),
        "drain": (30.0, "default"),
    }


def test_commands_table_precedes_the_top_of_the_file(file: Path) -> None:
    file.write_text('dtype = "float32"\nport = 1\n\n[run]\ndtype = "bfloat16"\n')
    assert values_of("run", {}, file)["dtype"].value == "bfloat16"
    assert values_of("run", {}, file)["dtype"].origin == f"{file}:5"
    assert values_of("serve", {}, file)["dtype"].value == "float32"


def test_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_PORT", "")
    assert values_of("serve", {}, None)["port"].origin == "default"


@pytest.mark.parametrize(("text", "keys"), [("one two", ["one", "two"]), ('["one", "t wo"]', ["one", "t wo"])])
def test_variable_may_contain_several_texts(monkeypatch: pytest.MonkeyPatch, text: str, keys: list[str]) -> None:
    monkeypatch.setenv("INLAY_API_KEY", text)
    assert values_of("serve", {}, None)["api_key"].value == keys


def test_every_kind_of_value_can_be_in_a_file(file: Path) -> None:
    file.write_text('kv_memory = 1048576\nstore_bytes = "4GB"\ncompile = true\nschema = "a.xml"\nmax_pass = 0\n')
    options = Options(values_of("serve", {}, file))
    assert options["schema"] == [file.parent / "a.xml"]
    config = EngineConfig(**options.fields_of(EngineConfig))
    assert (config.kv_bytes(), config.store_bytes, config.compile, config.max_pass_s) == (2**20, "4GB", True, None)


def test_a_flag_undoes_a_switch_of_the_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text("compile = true\n")
    status, out, _ = run(capsys, "config", "show", "--config", str(file), "--no-compile", "--given", "--json")
    assert (status, json.loads(out)) == (0, {"compile": {"value": False, "origin": "--compile"}})


def test_paths_in_a_file_are_relative_to_it(file: Path) -> None:
    file.write_text('store = "kv"\nadapter = ["sql=a/b"]\nkeys = "/k.json"\nmodel = "./m"\nchat_template = "~/t"\n')
    found = {key: one.value for key, one in values_of("serve", {}, file).items() if one.given}
    assert found == {
        "store": str(file.parent / "kv"),
        "adapter": [f"sql={file.parent / 'a/b'}"],
        "keys": Path("/k.json"),
        "model": str(file.parent / "m"),
        "chat_template": Path("~/t").expanduser(),
    }


@pytest.mark.parametrize(("key", "value"), [("store", "off"), ("model", "org/name")])
def test_values_that_are_not_paths_are_kept(file: Path, key: str, value: str) -> None:
    file.write_text(f'{key} = "{value}"\n')
    assert values_of("serve", {}, file)[key].value == value


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("\nprot = 1\n", "config.unknown_key", ":2: there is no setting 'prot'; did you mean port?"),
        ("[run]\n\nport = 1\n", "config.unknown_key", ":3: inlay run has no setting 'port'"),
        ("[serv]\nport = 1\n", "config.unknown_key", ":1: there is no setting 'serv'; did you mean serve?"),
        ("max-pass = 1\n", "config.unknown_key", "did you mean max_pass?"),
        ("port = \n", "config.not_toml", ":1:8: this is not TOML"),
        ("port = 1\nport = 2\n", "config.not_toml", ":2:"),
        ('port = "x"\n', "parameter.wrong_type", ":1: port: input should be a valid integer"),
        ("port = 1.5\n", "parameter.wrong_type", ":1: port: "),
        ("[port]\n", "parameter.wrong_type", "port: "),
        ("\nchunk_size = 0\n", "parameter.out_of_range", ":2: chunk_size is 0; it must be a whole number"),
        ('kv_memory = "much"\n', "parameter.invalid_size", ":1: kv_memory is 'much'"),
        ('store = ""\n', "parameter.invalid_folder", ":1: store is"),
        ('eviction = "fifo"\n', "parameter.unknown_choice", ":1: eviction is 'fifo'"),
        ('device = "tpu"\n', "parameter.unknown_choice", ":1: device is 'tpu'"),
    ],
)
def test_mistakes_in_a_file_are_located(file: Path, text: str, code: str, where: str) -> None:
    file.write_text(text)
    with raises(code, ParameterError) as caught:
        values_of("serve", {}, file)
    assert str(caught.value).startswith(str(file))
    assert where in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * 1_000_001])
def test_unreadable_files(file: Path, content: bytes | None) -> None:
    if content is not None:
        file.write_bytes(content)
    with raises("config.unreadable", ParameterError, names="inlay.toml"):
        values_of("serve", {}, file)


def test_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_MAX_NUM_SEQS", "0")
    with raises("parameter.out_of_range", ParameterError, names="INLAY_MAX_NUM_SEQS"):
        values_of("serve", {}, None)


def test_secret_value_is_never_shown(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INLAY_API_KEY", '["hush"')
    assert "hush" not in "".join(map(str, run(capsys, "config", "show")))
    monkeypatch.setenv("INLAY_API_KEY", "hush")
    file.write_text('store_shared = "redis://:hush@host:6379/0"\n')
    status, out, err = run(capsys, "config", "show", "--config", str(file))
    assert status == 0
    assert "hush" not in out + err
    assert '"(hidden)"  (INLAY_API_KEY)' in out


def test_config_show_reports_unknown_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INLAY_PROT", "1")
    assert "INLAY_PROT is no setting; did you mean INLAY_PORT?" in unknown_variables()
    assert "INLAY_PROT" in run(capsys, "config", "show")[2]


def test_config_show_accepts_options_of_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "config", "show", "run", "--port", "1")[0] == 2
    status, out, _ = run(capsys, "config", "show", "chat", "--json")
    assert (status, json.loads(out)["max_tokens"]) == (0, {"value": 512, "origin": "default"})


def test_the_file_may_be_named_in_the_environment(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("drain = 7\n")
    monkeypatch.setenv("INLAY_CONFIG", str(file))
    status, out, err = run(capsys, "config", "show", "--given")
    assert (status, out, err) == (0, f"drain = 7.0  ({file}:1)\n", "")


def test_command_uses_the_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """The option is one that needs no loaded model to be refused."""
    file.write_text('[serve]\nhost = "0.0.0.0"\nport = 0\n')
    status, _, err = run(capsys, "serve", "random:tiny", "--config", str(file))
    assert status == 2
    assert "--host 0.0.0.0 can be reached from other machines" in err


def test_run_uses_the_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text('max_tokens = 2\nstore = "off"\nkv_memory = "4MiB"\n')
    status, out, err = run(capsys, "run", "random:tiny", "Hello", "--json", "--config", str(file))
    assert status == 0, err
    assert len(json.loads(out)["token_ids"]) <= 2


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_setting_of_a_command_has_a_type_and_a_help(group: type) -> None:
    for name, one in settings_of(group).items():
        assert one.help.endswith("."), name
        assert set(one.commands) <= set(COMMANDS)
        assert set(one.defaults) <= set(one.commands), f"{name}: a default of a command that does not have it"
        assert one.option_type is not None or not one.commands, name


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_default_is_allowed(group: type) -> None:
    for one in settings_of(group).values():
        for default in (one.default, *one.defaults.values()):
            if default is not None:
                one.check(default)


def test_no_two_settings_of_a_command_share_an_option() -> None:
    for command in COMMANDS:
        declared = [
            one.key for group in GROUPS.values() for one in settings_of(group).values() if command in one.commands
        ]
        assert sorted(declared) == sorted(known_settings(command))


def test_a_server_gets_every_option(file: Path) -> None:
    """Options arrive in the fields of their dataclass, under the field's name."""
    options = Options(
        values_of("serve", {"slow_client": 3.0, "max_body": "9KiB", "api_key": ["k"], "timeout": 0.0}, None)
    )
    settings = ServerSettings(**options.fields_of(ServerSettings) | {"served_names": ("m",)})
    assert (settings.slow_client_s, settings.body_bytes, settings.api_keys) == (3.0, 9 * 2**10, ("k",))
    assert settings.timeout_s is None
    given = options.llm_settings("random:tiny")
    assert set(given) <= {*settings_of(ModelSettings), *settings_of(EngineConfig)}
    assert (given["max_waiting"], given["store"]) == (1024, "off")


def test_shells_complete_options_and_words() -> None:
    command = [sys.executable, "-c", "from inlay.cli.main import entry; entry()"]

    def completed(line: str) -> set[str]:
        environment = {"_INLAY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return set(said.stdout.split())

    assert "--kv-memory" in completed("inlay serve --kv-")
    assert completed("inlay serve --eviction l") == {"lru", "lru2", "lfu"}
    assert {"run", "serve", "config"} <= completed("inlay ")


@pytest.mark.parametrize(
    ("command", "also"),
    [
        ([], ("rich.console", "pydantic", "inlay.config")),
        (["--help"], ("inlay.config",)),
        (["chat", "--help"], ("inlay.pml",)),
        (["serve", "--help"], ("inlay.pml",)),
        (["chat", "./nowhere"], ("inlay.pml",)),
    ],
)
def test_command_does_not_import_unused_libraries(command: list[str], also: tuple[str, ...]) -> None:
    heavy = {"torch", "transformers", "fastapi", "numpy", "jinja2", "prometheus_client", *also}
    if "./nowhere" not in command:
        heavy.add("pydantic_settings")
    run = f"inlay.cli.main.main({command})" if command else "pass"
    script = f"import sys, inlay.cli.main; {run}; print(sorted({heavy} & sys.modules.keys()))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "[]"
