"""Keys and their file: no secret is stored, and no crash, race or edit leaves a file that is misread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import urlsafe_b64decode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import ParameterError
from inlay.server.limits import Limits
from inlay.server.tenants import KeyFile, check_tenant, editing, read_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(path: Path, tenant: str = "acme", **how) -> tuple[str, str]:
    with editing(path) as keys:
        return keys.add(tenant, **how)


def test_key_is_recognised_from_its_file(path: Path):
    key, key_id = add(path, admin=True)
    keys, _ = read_keys(path)
    entry = keys.entry_of(key)
    assert entry is not None
    assert (entry.tenant, entry.admin) == ("acme", True)
    prefix, named, secret = key.split("-", 2)
    assert (prefix, named) == ("inlay", key_id)
    assert len(urlsafe_b64decode(secret + "=")) == 32


def test_key_secret_is_not_stored(path: Path):
    key, key_id = add(path)
    text = path.read_text()
    assert key_id in text
    assert key.split("-", 2)[2] not in text
    assert len({add(path)[0].split("-", 2)[2] for _ in range(20)}) == 20


def test_keys_of_one_tenant_share_its_salt(path: Path):
    for tenant in ("acme", "acme", "other"):
        add(path, tenant)
    keys, _ = read_keys(path)
    assert len(keys.keys) == 3
    assert len({tenant.salt for tenant in keys.tenants.values()}) == 2
    assert len({key.salt for key in keys.keys.values()} | {tenant.salt for tenant in keys.tenants.values()}) == 5


_KEYS = KeyFile(version=1)
_KEY, _ID = _KEYS.add("acme")


@given(
    st.one_of(
        st.text(),
        st.text().map(lambda text: f"inlay-{_ID}-{text}"),
        st.integers(0, len(_KEY) - 1).map(lambda place: _KEY[:place] + chr(ord(_KEY[place]) ^ 1) + _KEY[place + 1 :]),
        st.integers(0, len(_KEY) - 1).map(lambda place: _KEY[:place]),
        st.sampled_from([f"{_KEY} ", f" {_KEY}", f"{_KEY}=", _KEY.upper(), _KEY.removeprefix("inlay-"), _ID]),
    )
)
def test_other_strings_are_not_the_key(other: str):
    assert _KEYS.entry_of(other) is None
    assert _KEYS.entry_of(_KEY) is not None


def test_limits_round_trip(path: Path):
    limits = Limits(requests_per_minute=3, max_reuse="exact")
    with editing(path) as keys:
        keys.add("acme")
        keys.tenants["acme"].limits = limits
    assert read_keys(path)[0].tenants["acme"].limits == limits
    assert json.loads(path.read_text())["tenants"]["acme"]["limits"] == {"requests_per_minute": 3, "max_reuse": "exact"}


def test_key_file_is_readable_only_by_its_owner(path: Path):
    previous = os.umask(0)
    try:
        add(path)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    add(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_key_file_readable_by_others_is_rejected(path: Path, mode: int):
    add(path)
    before = path.read_text()
    path.chmod(mode)
    for use in (lambda: read_keys(path), lambda: add(path)):
        with pytest.raises(ParameterError) as caught:
            use()
        assert str(caught.value) == f"{path}: others may read or change it (mode {mode:04o}); run chmod 600 {path}"
    assert path.read_text() == before


def test_symbolic_link_keeps_pointing_at_the_file(path: Path, tmp_path: Path):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "real.json"
    path.symlink_to(target)
    key, _ = add(path)
    add(path)
    assert path.is_symlink()
    keys, _ = read_keys(target)
    assert keys.entry_of(key) is not None
    assert len(keys.keys) == 2


def test_failed_change_leaves_the_file_unchanged(path: Path, monkeypatch):
    add(path)
    before = path.read_bytes()

    def give_up() -> None:
        with editing(path) as keys:
            keys.keys.clear()
            raise KeyError

    with pytest.raises(KeyError):
        give_up()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ParameterError, match=r"cannot be written \(No space left on device\); nothing has changed"):
        add(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]


def test_several_processes_add_keys_concurrently(path: Path):
    program = (
        "import sys, pathlib\n"
        "from inlay.server.tenants import editing\n"
        "for _ in range(8):\n"
        "    with editing(pathlib.Path(sys.argv[1])) as keys: print(keys.add('acme')[0])\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    made = [key for writer in writers for key in writer.communicate()[0].split()]
    keys, _ = read_keys(path)
    assert len(made) == len(keys.keys) == 24
    assert all(keys.entry_of(key) for key in made)
    assert len(keys.tenants) == 1


GOOD = json.loads(_KEYS.model_dump_json())


def damaged(*place: str, to: object) -> str:
    document = json.loads(json.dumps(GOOD))
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = to
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ('{"version": 1,\n "tenants"', "Invalid JSON: EOF while parsing an object at line 2 column 10"),
        ("[]", "Input should be an object"),
        (damaged("version", to=2), "version: Input should be 1"),
        (damaged("extra", to=2), "extra: Extra inputs are not permitted"),
        (damaged("keys", "zz", to={}), "keys.zz: String should match pattern"),
        (damaged("keys", _ID, "sha256", to="00"), f"keys.{_ID}.sha256: String should match pattern"),
        (damaged("keys", _ID, "admin", to="yes"), f"keys.{_ID}.admin: Input should be a valid boolean"),
        (damaged("keys", _ID, "tenant", to="who"), f"keys.{_ID} is of the tenant 'who', which does not exist"),
        (damaged("tenants", "a b", to={}), "tenants.a b: String should match pattern"),
        (damaged("tenants", "acme", "salt", to=""), "tenants.acme.salt: String should match pattern"),
        (damaged("tenants", "acme", "limits", to=5), "tenants.acme.limits: limits are an object"),
        (
            damaged("tenants", "acme", "limits", to={"max_token": 5}),
            "tenants.acme.limits: there is no limit 'max_token'; there are requests_per_minute, tokens_per_minute, ",
        ),
        (
            damaged("tenants", "acme", "limits", to={"max_tokens": 0}),
            "tenants.acme.limits: max_tokens is 0; it must be a whole number of at least 1",
        ),
    ],
    ids=lambda _: "",  # a key's name is drawn: processes that share the tests must call them the same
)
def test_damaged_file_gives_one_sentence_with_its_position(path: Path, text: str, sentence: str):
    path.write_text(text)
    path.chmod(0o600)
    for use in (lambda: read_keys(path), lambda: add(path)):
        with pytest.raises(ParameterError) as caught:
            use()
        message = str(caught.value)
        assert message.startswith(f"{path}: {sentence}")
        assert message.endswith("; correct it, or put a copy in its place")
        assert "\n" not in message
    assert path.read_text() == text


def test_several_problems_are_counted(path: Path):
    path.write_text('{"version": 1, "tenants": 5, "keys": 6, "more": 7}')
    path.chmod(0o600)
    with pytest.raises(ParameterError, match=r"tenants: .* \(and 2 more\)"):
        read_keys(path)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,versiontak 12').map(str.encode))
def test_any_file_contents_are_read_or_rejected(tmp_path_factory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ParameterError):
        read_keys(path)


def test_paths_without_a_regular_file_are_rejected(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, sentence in (
        ("pipe", "is no regular file"),
        (".", "Is a directory"),
        ("none", "no such file; make it"),
    ):
        with pytest.raises(ParameterError, match=sentence):
            read_keys(tmp_path / name)
    with pytest.raises(ParameterError, match="there is no folder"):
        add(tmp_path / "no" / "keys.json")


@pytest.mark.parametrize("name", ["a", "acme-7.test_X", "9" * 64])
def test_names_of_tenants(name: str):
    assert check_tenant(name) == name


@pytest.mark.parametrize("name", ["", "public", ".a", "a b", "a\n", "a" * 65, "ä", 'a"'])
def test_invalid_tenant_names_are_rejected(name: str):
    with pytest.raises(ParameterError, match="the tenant is "):
        check_tenant(name)
