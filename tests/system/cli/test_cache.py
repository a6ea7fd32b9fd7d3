"""``inlay cache``: lists the contents of a store, keeps and removes segments, and transfers them whole."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from inlay.cli.cache_source import FolderCache
from inlay.kv.offload.disk import DiskTier
from tests.commands import run
from tests.unit.kv.offload.segments import KEYS, filled, read, record_of, same, slabs_of, spec_of

SPECS = [spec_of(number) for number in (1, 2, 3)]
SCHEMA = '<schema name="s">Always. <module name="a">One module of some tokens.</module></schema>'


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """One of three segments, which INLAY_STORE names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INLAY_STORE", str(tmp_path / "store"))
    filled(tmp_path / "store", *SPECS).close()
    return tmp_path / "store"


def cache(capsys, *arguments: str, status: int = 0) -> str:
    done, out, err = run(capsys, "cache", *arguments)
    assert done == status, out + err
    return out if status != 2 else err


def listed(capsys) -> dict[str, dict]:
    return {row["key"]: row for row in json.loads(cache(capsys, "ls", "--json"))}


def damage(store: Path, number: int) -> None:
    path = DiskTier(store, 1 << 30).path(SPECS[number].key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_opening_the_folder_keeps_an_incoming_import(tmp_path):
    """An import is no draft that a process left which was ended."""
    source = filled(tmp_path / "source", SPECS[0])
    target = DiskTier(tmp_path / "target", 1 << 30)

    class Content(BytesIO):
        def read(self, size=-1):
            block = super().read(size)
            DiskTier(tmp_path / "target", 1 << 30).close()
            return block

    content = source.path(SPECS[0].key).read_bytes()
    FolderCache(target).take(Content(content), len(content))
    assert same(read(target, record_of(SPECS[0])), slabs_of(SPECS[0]))
    assert not list(tmp_path.rglob(".draft*"))


def test_ls_show_and_stats(capsys, store):
    rows = listed(capsys)
    assert {key: (row["tokens"], row["model"], row["uses"]) for key, row in rows.items()} == {
        spec.key.hex(): (40, "a model", 0) for spec in SPECS
    }
    lines = cache(capsys, "ls").splitlines()
    assert len(lines) == 4
    shown = json.loads(cache(capsys, "show", lines[1].split()[0]))
    assert shown["key"].startswith(lines[1].split()[0])
    assert shown["ids"] == list(next(spec.ids for spec in SPECS if spec.key.hex() == shown["key"]))
    told = json.loads(cache(capsys, "stats", "--json"))
    size = sum(row["bytes"] for row in rows.values())
    assert told["models"] == {"a model": {"segments": 3, "tokens": 120, "bytes": size, "uses": 0, "pinned": 0}}
    assert "3 segments (0 pinned), 120 tokens" in cache(capsys, "stats")


def test_pins_and_evictions(capsys, store):
    one, two = SPECS[0].key.hex(), SPECS[1].key.hex()
    assert cache(capsys, "pin", one) == "pinned 1 segments\n"
    assert [row["pinned"] for row in listed(capsys).values()].count(True) == 1
    assert "(pinned)" in cache(capsys, "ls")
    assert cache(capsys, "unpin", "--all") == "unpinned 3 segments\n"
    assert cache(capsys, "evict", one, two).startswith("evicted 2 segments")
    assert list(listed(capsys)) == [SPECS[2].key.hex()]
    assert cache(capsys, "evict", "--all").startswith("evicted 1 segments")
    assert listed(capsys) == {}


def test_verify_finds_and_removes_damaged_segments(capsys, store):
    assert cache(capsys, "verify") == "3 segments are whole, 0 were damaged\n"
    damage(store, 1)
    said = cache(capsys, "verify", status=1)
    assert said == (
        f"{SPECS[1].key.hex()}: the checksum of layer 1 does not hold; removed\n2 segments are whole, 1 were damaged\n"
    )
    assert cache(capsys, "verify") == "2 segments are whole, 0 were damaged\n"


def test_exported_segments_are_imported(capsys, store, tmp_path):
    assert cache(capsys, "export", "all.tar") == "exported 3 segments to all.tar\n"
    assert "all.tar exists" in cache(capsys, "export", "all.tar", status=2)
    assert cache(capsys, "export", "all.tar", SPECS[0].key.hex(), "--force") == "exported 1 segments to all.tar\n"
    assert cache(capsys, "export", "three.tar").startswith("exported 3")
    assert cache(capsys, "import", "three.tar", "--store", "other") == "imported 3 segments, 0 were damaged\n"
    other = DiskTier(tmp_path / "other", 1 << 30)
    assert all(same(read(other, record_of(spec)), slabs_of(spec)) for spec in SPECS)
    assert all(path.stat().st_mode & 0o077 == 0 for path in other.folder.glob("*.safetensors"))


def test_damaged_archive_members_are_not_imported(capsys, store, tmp_path):
    """Names in an archive are ignored: a file is placed by its own header, or not at all."""
    sound = DiskTier(store, 1 << 30).path(SPECS[0].key).read_bytes()
    with tarfile.open("mixed.tar", "w") as archive:
        for name, data in (
            ("../../escaped.safetensors", sound),
            ("flipped.safetensors", sound[:-1] + b"x"),
            ("cut.safetensors", sound[:5000]),
            ("noise", b"no segment"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    said = cache(capsys, "import", "mixed.tar", "--store", "other", status=1)
    assert said.endswith("imported 1 segments, 3 were damaged\n")
    assert sorted(path.name for path in (tmp_path / "other" / "v1").glob("*.safetensors")) == [
        f"{SPECS[0].key.hex()}.safetensors"
    ]
    assert not list(tmp_path.rglob("escaped*"))
    assert not list(tmp_path.rglob(".draft*"))


def test_warmed_modules_are_read_by_a_later_process(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.xml").write_text(SCHEMA)
    Path("p.xml").write_text('<prompt schema="s"><a/>What then?</prompt>')
    tokens = int(cache(capsys, "warm", "s.xml", "--reuse", "anchored", "--store", "here").split()[0])
    assert tokens > 0
    assert (
        cache(capsys, "warm", "s.xml", "--reuse", "anchored", "--store", "here")
        == f"0 tokens encoded, {tokens} were there\n"
    )
    status, out, err = run(
        capsys,
        "run",
        "s.xml",
        "--prompt",
        "p.xml",
        "--json",
        "--max-tokens",
        "2",
        "--store",
        "here",
        "--reuse",
        "anchored",
    )
    assert status == 0, err
    assert json.loads(out)["encoded_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("evict",), "name segments by their keys, or give --all"),
        (("evict", "ab", "--all"), "name segments by their keys, or give --all"),
        (("show", "xyz"), "0 segments have a key that begins with 'xyz'; see inlay cache ls"),
        (("pin", ""), "the argument behind 'pin' is empty; give it a value, or leave it out"),
        (("ls", "--store", "off"), "there is no store; name its folder with --store"),
        (("import", "none.tar"), "none.tar cannot be read ([Errno 2] No such file or directory: 'none.tar'); "),
    ],
)
def test_errors_are_one_sentence(capsys, store, arguments, sentence):
    assert sentence in cache(capsys, *arguments, status=2)


def test_codecs_are_listed(capsys, store):
    lossy = spec_of(4).through("int8", KEYS)
    filled(store, lossy).close()
    assert {row["key"]: row["codec"] for row in listed(capsys).values()} == {
        **{spec.key.hex(): "none" for spec in SPECS},
        lossy.key.hex(): "int8",
    }
    told = json.loads(cache(capsys, "stats", "--json"))["codecs"]["a model"]
    assert {codec: row["segments"] for codec, row in told.items()} == {"none": 3, "int8": 1}
    assert "of these as int8: 1 segments, 40 tokens" in cache(capsys, "stats")
    assert json.loads(cache(capsys, "show", lossy.key.hex()))["codec"] == "int8"
    assert "4 segments are whole" in cache(capsys, "verify")
    path = DiskTier(store, 1 << 30).path(lossy.key)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert "3 segments are whole, 1 were damaged" in cache(capsys, "verify", status=1)


@pytest.mark.parametrize(
    "arguments", ["ls", "show ab", "pin --all", "evict --all", "verify", "stats", "export out.tar"]
)
def test_misspelt_store_is_rejected_and_not_created(capsys, store, arguments):
    assert cache(capsys, *arguments.split(), "--store", "stoer", status=2) == (
        "inlay: stoer: no such folder; give that of a store, as inlay cache warm --store makes one\n"
    )
    assert not Path("stoer").exists()


def test_empty_store_is_reported(capsys, store):
    cache(capsys, "evict", "--all")
    assert run(capsys, "cache", "ls") == (0, "", f"inlay: nothing is stored in {store}\n")
    assert cache(capsys, "ls", "--json") == "[]\n"
