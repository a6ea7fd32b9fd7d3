"""/v1/cache: a tenant sees and changes only its own and public segments; files are transferred whole."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inlay import AsyncLLM, Schema
from inlay.kv.offload.disk import DiskTier
from inlay.server import cache_view
from inlay.server.app import build_app
from inlay.server.limits import Limits
from inlay.server.settings import ServerSettings
from inlay.server.tenants import editing
from tests.commands import run
from tests.conftest import tiny
from tests.counting import calls_of
from tests.model.families.configs import tiny as recurrent
from tests.model.server.site import CHAT, SCHEMAS, Site, refused, serving_app
from tests.unit.kv.offload.segments import filled, read, record_of, same, slabs_of, spec_of

SEGMENTS = "/v1/cache/segments"
TRIP = '<schema name="trip">You plan. <module name="lima">Go to Lima, by the sea.</module></schema>'
NAMES = ("first", "second", "third")
OPEN = '<schema name="open">All may read. <module name="oslo">Go to Oslo, to the north.</module></schema>'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Tenants ann, bob, few (may pin little), once (may ask once) and root; a schema of ann's, a public one."""
    path = tmp_path / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name, admin=name == "root")[0] for name in ("ann", "bob", "few", "once", "root")}
        file.tenants["few"].limits = Limits(max_pinned_bytes=1)
        file.tenants["once"].limits = Limits(requests_per_minute=1)
    settings = {"kv_memory": "4MiB", "chunk_size": 8, "reuse": "anchored"}
    llm = AsyncLLM(tiny("llama"), store=tmp_path / "store", store_private=True, **settings)
    with serving_app(build_app(llm, ServerSettings(keys_file=path)), keys) as site:
        assert site.call("POST", SCHEMAS, {"pml": TRIP, "reuse": "anchored"}, key="ann")[0] == 201
        assert site.call("POST", SCHEMAS, {"pml": OPEN, "public": True, "reuse": "anchored"}, key="root")[0] == 201
        yield site
    llm.shutdown()


def listed(site: Site, key: str | None) -> list[dict[str, Any]]:
    status, _, page = site.call("GET", SEGMENTS, key=key)
    assert status == 200, page
    return page["data"]


def test_tenant_sees_its_own_and_public_segments(site):
    assert {(row["schema"], row["private"]) for row in listed(site, "ann")} == {("trip", True), ("open", False)}
    for key in ("bob", "root"):
        assert {row["schema"] for row in listed(site, key)} == {"open"}, "not even an admin sees another's keys"
    own = next(row for row in listed(site, "ann") if row["module"] == "lima")
    assert "pool" in own["tiers"]
    uses = {key: {row["private"]: row["uses"] for row in listed(site, key)} for key in ("ann", "root")}
    assert uses["ann"] == {True: own["uses"], False: None}, "nor how often others read what is public"
    assert own["uses"] >= 0
    assert uses["root"][False] >= 0
    assert own["idle_s"] >= 0
    assert {row["idle_s"] is None for row in listed(site, "ann") if not row["private"]} == {True}, "nor when"
    for method, path in (("GET", ""), ("DELETE", ""), ("PUT", "/pin"), ("DELETE", "/pin"), ("GET", "/file")):
        refused(site.call(method, f"{SEGMENTS}/{own['key']}{path}", key="bob"), 404, "not_found")
    assert site.call("GET", f"{SEGMENTS}/{own['key']}", key="ann")[2]["ids"]


def test_part_of_a_message_is_visible_only_to_its_tenant(site):
    part = {"type": "text", "text": "A long document. " * 5, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "reuse": "modular"}
    assert site.call("POST", CHAT, body, key="bob")[0] == 200
    (row,) = [row for row in listed(site, "bob") if row["schema"] is None and row["ttl_s"] is not None]
    assert 3500 < row["ttl_s"] <= 3600
    for other in ("ann", "root"):
        assert row["key"] not in {seen["key"] for seen in listed(site, other)}


def test_primer_is_listed_by_name(site):
    body = {"pml": TRIP.replace("trip", "journey"), "reuse": "modular", "public": True}
    assert site.call("POST", SCHEMAS, body, key="root")[0] == 201
    assert "primer" in {row["module"] for row in listed(site, "root") if row["schema"] is None}


def test_pages(site):
    first = site.call("GET", f"{SEGMENTS}?limit=1", key="ann")[2]
    rest = site.call("GET", f"{SEGMENTS}?after={first['data'][0]['key']}", key="ann")[2]
    assert first["has_more"]
    assert not rest["has_more"]
    assert [row["key"] for row in (*first["data"], *rest["data"])] == [row["key"] for row in listed(site, "ann")]
    refused(site.call("GET", f"{SEGMENTS}?page=2", key="ann"), 400, "invalid_value")


def test_pins_and_evictions(site):
    row = next(row for row in listed(site, "ann") if row["module"] == "lima")
    assert site.call("PUT", f"{SEGMENTS}/{row['key'][:12]}/pin", key="ann")[2]["pinned_bytes"] > 0
    assert [one["pinned"] for one in listed(site, "ann") if one["key"] == row["key"]] == [True]
    assert site.call("DELETE", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"] == 0
    public = listed(site, "few")[0]
    refused(site.call("PUT", f"{SEGMENTS}/{public['key']}/pin", key="few"), 403, "pin_limit")
    refused(site.call("DELETE", f"{SEGMENTS}/{public['key']}", key="ann"), 403, "admin_only")
    assert site.call("DELETE", f"{SEGMENTS}/{row['key']}", key="ann")[2]["evicted_tokens"] == row["tokens"]
    assert row["key"] not in {one["key"] for one in listed(site, "ann")}
    assert site.call("DELETE", f"{SEGMENTS}/{public['key']}", key="root")[0] == 200


def test_pins_by_key_and_by_schema_are_independent(site):
    row = next(row for row in listed(site, "ann") if row["module"] == "lima")
    one = site.call("PUT", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"]
    both = site.call("PUT", f"{SCHEMAS}/trip/pin", key="ann")[2]["pinned_bytes"]
    assert both > one
    assert site.call("DELETE", f"{SCHEMAS}/trip/pin", key="ann")[2]["was_pinned"]
    assert site.call("PUT", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"] == one
    site.call("PUT", f"{SCHEMAS}/trip/pin", key="ann")
    assert site.call("DELETE", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"] == both
    for segment in listed(site, "ann"):
        if segment["pinned"]:
            site.call("DELETE", f"{SEGMENTS}/{segment['key']}", key="ann")
    assert site.call("GET", f"{SCHEMAS}/trip", key="ann")[2]["pinned"] is False


def test_pin_by_key_ends_with_its_last_public_schema(site):
    row = next(row for row in listed(site, "ann") if row["module"] == "oslo")
    twin = {"pml": OPEN.replace('"open"', '"twin"'), "public": True, "reuse": "anchored"}
    assert site.call("POST", SCHEMAS, twin, key="root")[0] == 201
    taken = site.call("PUT", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"]
    assert site.call("DELETE", f"{SCHEMAS}/open?public=true", key="root")[0] == 200
    assert pinned_bytes(site) == taken, "twin has it, too"
    changed = {**twin, "pml": twin["pml"].replace("Go to Oslo", "Stay in Oslo")}
    assert site.call("PUT", f"{SCHEMAS}/twin", changed, key="root")[0] == 200
    assert pinned_bytes(site) == 0
    assert row["key"] not in {one["key"] for one in listed(site, "ann")}
    (left,) = [one for one in listed(site, "root") if one["key"] == row["key"]]
    assert (left["schema"], left["private"], "pool" in left["tiers"]) == (None, False, True)
    assert site.call("DELETE", f"{SEGMENTS}/{row['key']}", key="root")[2]["evicted_tokens"] == row["tokens"]
    assert row["key"] not in {one["key"] for one in listed(site, "root")}


def test_tenant_sees_and_can_unpin_its_pins(site):
    """This holds in every tier, and after the schema has been removed."""
    row = next(row for row in listed(site, "ann") if row["module"] == "oslo")
    llm = site.app.state.service.llm
    site.call("PUT", f"{SEGMENTS}/{row['key']}/pin", key="ann")
    llm.remove_schema("open")  # unnoticed by the server, which drops pins by key
    (seen,) = [one for one in listed(site, "ann") if one["key"] == row["key"]]
    assert seen["pinned"]
    assert row["key"] not in {one["key"] for one in listed(site, "bob")}
    assert site.call("DELETE", f"{SEGMENTS}/{row['key']}/pin", key="ann")[2]["pinned_bytes"] == 0
    assert row["key"] not in {one["key"] for one in listed(site, "ann")}


def pinned_bytes(site: Site) -> int:
    return site.call("GET", "/v1/cache", key="ann")[2]["pool"]["pinned_bytes"]


def test_no_more_is_looked_at_than_a_page_takes_and_little_at_a_time(site, monkeypatch):
    llm = site.app.state.service.llm
    whole = [row["key"] for row in listed(site, "ann")]
    looks = calls_of(monkeypatch, llm.client, "look")
    monkeypatch.setattr(cache_view, "PER_TURN", 2)
    assert [row["key"] for row in listed(site, "ann")] == whole
    assert len(looks) > 1
    assert max(len(request.specs) for request, _ in looks) == 2
    looks.clear()
    assert site.call("GET", f"{SEGMENTS}?limit=1", key="ann")[2]["has_more"]
    assert site.call("GET", f"{SEGMENTS}/{whole[-1]}", key="ann")[2]["key"] == whole[-1]
    assert [len(request.specs) for request, _ in looks] == [2, 1], (
        "one for the page and one to see if there are more; the one that is named"
    )


def test_opening_the_folder_keeps_an_incoming_file(tmp_path):
    """A file that is sent is no draft that a process left which was ended."""
    source = filled(tmp_path / "source", spec_of(1))
    target = DiskTier(tmp_path / "target", 1 << 30)
    llm: Any = SimpleNamespace(local=SimpleNamespace(residency=SimpleNamespace(tiers=[target])))
    schemas: Any = None

    async def pieces() -> AsyncIterator[bytes]:
        content = source.path(spec_of(1).key).read_bytes()
        for at in range(0, len(content), 1000):
            yield content[at : at + 1000]
            DiskTier(tmp_path / "target", 1 << 30).close()

    record = asyncio.run(cache_view.CacheView(llm, schemas).take(pieces()))
    assert record.key == spec_of(1).key
    assert same(read(target, record_of(spec_of(1))), slabs_of(spec_of(1)))
    assert not list(tmp_path.rglob(".draft*"))


@pytest.mark.parametrize("name", ["/secret-place/small", "/secret-place/small.gguf", "../secret-place/small"])
def test_model_path_is_never_shown(tmp_path: Path, name: str):
    """Neither the listing, nor the tenant's files, nor the errors contain the path."""
    loaded = replace(tiny("llama"), name=name)
    llm = AsyncLLM(loaded, kv_memory="4MiB", chunk_size=8, store=tmp_path / "secret-place")
    with serving_app(build_app(llm, ServerSettings(), [Schema.from_string(OPEN)]), {}) as site:
        assert site.call("POST", f"{SCHEMAS}/open/warm", {}, key=None)[0] == 200
        llm.local.residency.flush(30)
        (first, *_) = listed(site, None)
        answers = [
            site.call(method, path, body, key=None)
            for method, path, body in (
                ("GET", "/v1/models", None),
                ("GET", "/v1/cache", None),
                ("GET", SEGMENTS, None),
                ("GET", f"{SEGMENTS}/{first['key']}", None),
                ("GET", f"{SEGMENTS}/{first['key']}/file", None),
            )
        ]
        path = tmp_path / "secret-place" / "v1" / f"{first['key']}.safetensors"
        path.unlink()
        path.symlink_to(tmp_path)
        answers.append(site.call("POST", "/v1/cache/verify", {}, key=None))
        assert answers[-1][2]["problems"]
        path.unlink()
        answers.append(site.call("GET", f"{SEGMENTS}/{first['key']}/file", key=None))
        assert answers[-1][0] == 404
    llm.shutdown()
    assert "secret-place" not in str(answers)
    assert {answer[2]["model"] for answer in answers[1:4:2]} == {Path(name).name}


def test_global_operations_are_for_admins(site):
    refused(site.call("POST", "/v1/cache/verify", {}, key="ann"), 403, "admin_only")
    file = {"Content-Type": "application/octet-stream"}
    refused(site.call("POST", "/v1/cache/files", b"no file", key="ann", headers=file), 403, "admin_only")
    refused(site.call("POST", "/v1/cache/files", b"no file", key="root", headers=file), 400, "invalid_file")
    refused(site.call("POST", "/v1/cache/files", b"no file", key="root"), 415, "unsupported_media_type")
    assert site.call("GET", "/v1/cache", key="ann")[2]["pool"]["segments"] > 0


def test_requests_are_counted(site):
    statuses = [site.call("GET", SEGMENTS, key="once")[0] for _ in range(2)]
    assert statuses == [200, 429]


# inlay cache --url


def cache(capsys, site: Site, *arguments: str, key: str = "ann", status: int = 0) -> str:
    done, out, err = run(
        capsys, "cache", *arguments, "--url", f"http://127.0.0.1:{site.port}", "--api-key", site.keys[key]
    )
    assert done == status, out + err
    return out if status != 2 else err


def test_the_commands_on_a_server(capsys, site, tmp_path):
    assert "trip/lima" in cache(capsys, site, "ls")
    (row,) = [row for row in listed(site, "ann") if row["module"] == "lima"]
    short = row["key"][:12]
    assert f'"key": "{row["key"]}"' in cache(capsys, site, "show", short)
    assert cache(capsys, site, "pin", short) == "pinned 1 segments\n"
    assert "(pinned)" in cache(capsys, site, "ls")
    assert cache(capsys, site, "unpin", short) == "unpinned 1 segments\n"
    assert "pool: " in cache(capsys, site, "stats")
    assert "only an admin may read every file" in cache(capsys, site, "verify", status=2)
    while site.app.state.service.llm.stats().unwritten_segments:
        pass
    assert cache(capsys, site, "verify", key="root").endswith("0 were damaged\n")
    tar = str(tmp_path / "all.tar")
    exported = cache(capsys, site, "export", tar)
    assert exported.startswith(f"exported {len(listed(site, 'ann'))} segments")
    assert cache(capsys, site, "evict", short).startswith("evicted 1 segments")
    assert "trip/lima" not in cache(capsys, site, "ls")
    assert "only an admin may put files" in cache(capsys, site, "import", tar, status=2)
    assert cache(capsys, site, "import", tar, key="root").endswith("0 were damaged\n")
    assert "trip/lima" in cache(capsys, site, "ls"), "it is in the store again"
    assert "tokens are encoded" in cache(capsys, site, "warm", "trip")
    assert "there is no schema" in cache(capsys, site, "warm", "nowhere", status=2)


def test_schema_missing_on_a_server_is_created(capsys, site, tmp_path):
    path = tmp_path / "new.xml"
    path.write_text('<schema name="new"><module name="a">Some text of a module.</module></schema>')
    assert "tokens are encoded" in cache(capsys, site, "warm", str(path), "--ttl", "1h")
    assert site.call("GET", f"{SCHEMAS}/new", key="ann")[2]["ttl"] == "1h"


def test_unreachable_server_is_reported(capsys, site, tmp_path):
    said = run(capsys, "cache", "ls", "--url", "http://127.0.0.1:9")
    assert said[0] == 2
    assert "does not answer" in said[2]
    assert "--store names a folder, and --url a server" in cache(capsys, site, "ls", "--store", "x", status=2)
    assert "write the address of a server" in run(capsys, "cache", "ls", "--url", "somewhere")[2]


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (errno.ENOSPC, 507, "insufficient_storage"),
        (errno.EDQUOT, 507, "insufficient_storage"),
        (errno.EROFS, 500, "storage_failed"),
    ],
)
@pytest.mark.parametrize("place", ["inlay.server.cache_view.write_all", "inlay.kv.offload.disk.os.rename"])
def test_disk_write_error_is_one_sentence(site, monkeypatch, tmp_path, caplog, place, number, status, code):
    """The system's calls are replaced: a test cannot fill a disk."""
    site.app.state.service.llm.local.residency.flush(30)
    (own,) = [row for row in listed(site, "ann") if row["module"] == "lima"]
    whole = (tmp_path / "store" / "v1" / f"{own['key']}.safetensors").read_bytes()
    before = {path.name for path in (tmp_path / "store" / "v1").iterdir()}

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "store"))

    monkeypatch.setattr(place, full)
    heads = {"Content-Type": "application/octet-stream"}
    answer = site.call("POST", "/v1/cache/files", whole, key="root", headers=heads)
    refused(answer, status, code)
    assert os.strerror(number).lower() in answer[2]["error"]["message"]
    assert str(tmp_path) not in json.dumps(answer[2])
    assert {path.name for path in (tmp_path / "store" / "v1").iterdir()} == before, "no draft stays"
    assert os.strerror(number) in caplog.text
    assert "Traceback" not in caplog.text


def test_parts_with_a_common_prefix_are_listed_and_evicted_per_tenant(capsys, site):
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": f"The {name} is a document of some length. " * 2} | mark for name in NAMES]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], "max_tokens": 1}
    for _ in range(2):
        assert site.call("POST", CHAT, body, key="bob")[0] == 200
    own = [row for row in listed(site, "bob") if row["private"]]
    assert len(own) >= len(NAMES)
    public = [row for row in listed(site, "bob") if not row["private"]]
    anns = listed(site, "ann")
    done, out, err = run(
        capsys, "cache", "evict", "--all", "--url", f"http://127.0.0.1:{site.port}", "--api-key", site.keys["bob"]
    )
    assert (done, f"evicted {len(own)} segments" in out) == (0, True), out + err
    assert f"{len(public)} segments of public schemas stay" in err
    assert [row["key"] for row in listed(site, "bob")] == [row["key"] for row in public]
    assert [row["key"] for row in listed(site, "ann")] == [row["key"] for row in anns]
    usage = site.call("POST", CHAT, body, key="bob")[2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_all_of_a_tenant_includes_text_with_states_that_an_earlier_server_has_written(tmp_path):
    path = tmp_path / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name)[0] for name in ("ann", "bob")}
    body = {"pml": '<prompt schema="trip"><lima/><user>Where to?</user></prompt>', "max_tokens": 2}

    def written() -> set[Path]:
        return set((tmp_path / "store" / "v1").glob("*.safetensors"))

    before: list[set[Path]] = []
    for ends in (False, True):
        llm = AsyncLLM(recurrent("qwen3_5_text"), kv_memory="4MiB", store=tmp_path / "store", store_private=True)
        with serving_app(build_app(llm, ServerSettings(keys_file=path)), keys) as site:
            for key in () if ends else keys:
                assert site.call("POST", SCHEMAS, {"pml": TRIP}, key=key)[0] == 201
                assert site.call("POST", "/v1/completions", body, key=key)[0] == 200
                llm.local.residency.flush(10)
                before.append(written())
            if ends:
                assert site.call("POST", SCHEMAS, {"pml": TRIP}, key="ann")[0] == 201
                assert site.call("DELETE", SEGMENTS, key="ann")[0] == 200
        llm.shutdown()
    ann, both = before
    assert len(ann) == 1
    assert written() == both - ann


def test_all_of_a_tenant_includes_marked_parts_that_an_earlier_server_has_written(tmp_path):
    path = tmp_path / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name)[0] for name in ("ann", "bob")}
    part = {"type": "text", "text": "A document of some length. " * 4, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], "max_tokens": 1}

    def written() -> set[Path]:
        return set((tmp_path / "store" / "v1").glob("*.safetensors"))

    before: list[set[Path]] = []
    for ends in (False, True):
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", chunk_size=8, store=tmp_path / "store", store_private=True)
        with serving_app(build_app(llm, ServerSettings(keys_file=path)), keys) as site:
            for key in () if ends else keys:
                for _ in range(2):
                    assert site.call("POST", CHAT, body, key=key)[0] == 200
                llm.local.residency.flush(10)
                before.append(written())
            if ends:
                answer = site.call("DELETE", SEGMENTS, key="ann")[2]
                assert answer["evicted_tokens"] > 100
        llm.shutdown()
    ann, both = before
    assert ann
    assert written() == both - ann


@pytest.mark.parametrize("caller", ["ann", "root"])
def test_all_of_a_tenant_includes_schemas_that_only_an_earlier_server_had(tmp_path, caller):
    """An admin's call includes public schemas. No other tenant's text is removed."""
    path = tmp_path / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name, admin=name == "root")[0] for name in ("ann", "bob", "root")}
    bodies = {"ann": {"pml": TRIP}, "bob": {"pml": TRIP}, "root": {"pml": OPEN, "public": True}}
    owned: dict[str, set[Path]] = {}
    folder = tmp_path / "store" / "v1"
    for ends in (False, True):
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", chunk_size=8, store=tmp_path / "store", store_private=True)
        with serving_app(build_app(llm, ServerSettings(keys_file=path)), keys) as site:
            for key, body in bodies.items() if not ends else ():
                asked = body | {"reuse": "anchored", "encode": True}
                assert site.call("POST", SCHEMAS, asked, key=key)[0] == 201
                llm.local.residency.flush(10)
                owned[key] = set(folder.glob("*.safetensors")).difference(*owned.values())
            if ends:
                assert site.call("DELETE", SEGMENTS, key=caller)[2]["evicted_tokens"] > 0
        llm.shutdown()
    assert all(owned.values())
    left = set(folder.glob("*.safetensors"))
    assert left == set().union(*(files for owner, files in owned.items() if owner != caller))


def test_segments_of_other_models_are_counted_separately(tmp_path, capsys):
    """Two models share a folder by default; one server is asked what it holds."""
    for model in ("qwen2", "llama"):
        llm = AsyncLLM(tiny(model), kv_memory="4MiB", chunk_size=8, store=tmp_path, reuse="anchored")
        with serving_app(build_app(llm, ServerSettings(), [Schema.from_string(OPEN)]), {}) as site:
            assert site.call("POST", f"{SCHEMAS}/open/warm", {}, key=None)[0] == 200
            llm.local.residency.flush(30)
            disk = site.call("GET", "/v1/cache", key=None)[2]["disk"]
            said = run(capsys, "cache", "stats", "--url", f"http://127.0.0.1:{site.port}")[1]
            listed_bytes = [row for row in listed(site, None) if "disk" in row["tiers"]]
        llm.shutdown()
    assert disk["segments"] == len(listed_bytes) == 3  # with the primer
    assert disk["tokens"] == sum(row["tokens"] for row in listed_bytes)
    assert disk["all_models"]["segments"] == 6
    assert disk["all_models"]["bytes"] > disk["bytes"] > 0
    assert "disk: 3 segments, " in said
    assert ", beside 3 segments of other models" in said
