"""``inlay keys``: a key is printed once, and the file and its lists never show one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.server.limits import Limits
from inlay.server.tenants import Tenants, read_keys
from tests.commands import run


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def add(capsys, *arguments: str) -> str:
    """A new key."""
    status, out, err = run(capsys, "keys", "add", "--file", "keys.json", *arguments)
    assert status == 0
    key, *nothing = out.splitlines()
    assert not nothing
    assert key not in err
    return key


def test_key_from_creation_to_revocation(capsys):
    key = add(capsys, "--tenant", "acme", "--requests-per-minute", "60", "--max-reuse", "exact")
    admin = add(capsys, "--tenant", "acme", "--admin")
    tenants = Tenants.from_file(Path("keys.json"))
    asked = [tenants.of(f"Bearer {one}") for one in (key, admin)]
    assert [(one.name, one.admin) for one in asked] == [("acme", False), ("acme", True)]
    assert asked[0].salt == asked[1].salt
    assert asked[0].limits == asked[1].limits == Limits(requests_per_minute=60, max_reuse="exact")
    key_id = key.split("-")[1]
    status, out, _ = run(capsys, "keys", "revoke", key_id, "--file", "keys.json")
    assert (status, out) == (0, f"{key_id} of 'acme' is revoked\n")
    keys, _ = read_keys(Path("keys.json"))
    assert keys.entry_of(key) is None
    assert keys.entry_of(admin) is not None


def test_the_cache_of_a_tenant_outlives_its_last_key(capsys):
    key = add(capsys, "--tenant", "acme")
    before = read_keys(Path("keys.json"))[0].tenants
    run(capsys, "keys", "revoke", key.split("-")[1], "--file", "keys.json")
    add(capsys, "--tenant", "acme")
    assert read_keys(Path("keys.json"))[0].tenants == before


def test_lists_show_no_secrets(capsys):
    key = add(capsys, "--tenant", "acme", "--max-tokens", "100")
    add(capsys, "--tenant", "other", "--admin")
    file = json.loads(Path("keys.json").read_text())
    secrets = {key.split("-", 2)[2], *(tenant["salt"] for tenant in file["tenants"].values())}
    secrets |= {entry[name] for entry in file["keys"].values() for name in ("salt", "sha256")}
    status, table, _ = run(capsys, "keys", "list", "--file", "keys.json")
    assert status == 0
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["acme", "max_tokens", "100"],
        ["other", "no", "limits"],
    ]
    status, out, _ = run(capsys, "keys", "list", "--file", "keys.json", "--json")
    listed = json.loads(out)
    assert [(one["tenant"], one["admin"]) for one in listed["keys"]] == [("acme", False), ("other", True)]
    assert listed["keys"][0]["id"] == key.split("-")[1]
    assert listed["tenants"] == [{"name": "acme", "limits": {"max_tokens": 100}}, {"name": "other", "limits": {}}]
    assert not [secret for secret in secrets if secret in table + out]


def test_limits_are_replaced(capsys):
    add(capsys, "--tenant", "acme", "--max-tokens", "100")
    limit = ("keys", "limit", "--file", "keys.json", "--tenant", "acme")
    assert run(capsys, *limit, "--max-concurrent", "2", "--tokens-per-minute", "900")[:2] == (
        0,
        "acme: tokens_per_minute 900, max_concurrent 2\n",
    )
    assert read_keys(Path("keys.json"))[0].tenants["acme"].limits == Limits(max_concurrent=2, tokens_per_minute=900)
    assert run(capsys, *limit)[:2] == (0, "acme: no limits\n")
    assert read_keys(Path("keys.json"))[0].tenants["acme"].limits == Limits()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("add --file new.json", "Missing option '--tenant'"),
        ("add --tenant a", "Missing option '--file'"),
        ("add --file new.json --tenant a/b", "the tenant is 'a/b'; write 1 to 64 letters"),
        ("add --file new.json --tenant public", "the tenant is 'public', which is reserved for servers without keys"),
        ("add --file new.json --tenant a --max-tokens 0", "Invalid value for '--max-tokens'"),
        ("add --file new.json --tenant a --max-reuse all", "max_reuse is 'all'; use one of off, exact, auto, modular"),
        ("add --file no/new.json --tenant a", "no/new.json: there is no folder no; make it first"),
        (
            "add --file keys.json --tenant acme --max-tokens 5",
            "keys.json: the tenant 'acme' exists, with no limits; add the key without limits, and change them with",
        ),
        ("list --file new.json", "new.json: no such file; make it with inlay keys add --file new.json --tenant …"),
        ("limit --file keys.json --tenant b", "keys.json: there is no tenant 'b'; inlay keys list shows them"),
        ("revoke 0123 --file keys.json", "keys.json: there is no key '0123'; inlay keys list shows their ids"),
        ("revoke 0123", "Missing option '--file'"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments: str, sentence: str):
    add(capsys, "--tenant", "acme")
    before = Path("keys.json").read_bytes()
    status, out, err = run(capsys, "keys", *arguments.split())
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("inlay: ")
    assert sentence in err
    assert Path("keys.json").read_bytes() == before
    assert [file.name for file in Path().iterdir()] == ["keys.json"]
