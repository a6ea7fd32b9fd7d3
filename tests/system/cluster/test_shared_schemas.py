"""Two ingresses over one folder: a schema change by one is known to the other before its next request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from inlay import AsyncLLM, Schema
from inlay.api.failures import BodyError
from inlay.cluster.schema_folder import SchemaFolder
from inlay.server.limits import EVERYBODY, Tenant
from inlay.server.schema_catalog import SchemaCatalog
from inlay.server.schema_record import SchemaSource, of_schema
from tests.conftest import tiny
from tests.raising import raises

ANN = Tenant("ann", "salt of ann")


def source(text: str, name: str = "s") -> SchemaSource:
    return of_schema(Schema.from_json({"name": name, "content": [{"module": "m", "content": text}]}))


def catalog(folder: Path) -> SchemaCatalog:
    return SchemaCatalog(AsyncLLM(tiny("llama"), kv_memory="1MiB"), keeper=SchemaFolder(folder))


async def make(one: SchemaCatalog, text: str, salt: str | None = None) -> None:
    await one.refresh()
    await one.create(source(text), salt=salt, reuse="modular", positions=None)


def test_schema_of_one_ingress_is_known_to_the_other(tmp_path: Path):
    async def run() -> None:
        one, other = catalog(tmp_path), catalog(tmp_path)
        await make(one, "Public.")
        await make(one, "Private.", ANN.salt)
        await other.refresh()
        assert [record.public for record in other.visible(EVERYBODY)] == [True]
        assert [record.public for record in other.visible(ANN)] == [False]
        found = other.find("s", ANN)
        assert (found.source.document(), found.etag) == (one.find("s", ANN).source.document(), one.find("s", ANN).etag)
        await other.replace(found, source("Changed."), reuse="modular", positions=None, if_match=found.etag)
        await one.refresh()
        assert one.find("s", ANN).version == 2
        await one.remove(one.find("s", EVERYBODY), if_match=None)
        await other.refresh()
        assert other.visible(EVERYBODY) == []
        late = catalog(tmp_path)  # an ingress that starts later
        await late.refresh()
        assert late.find("s", ANN).version == 2

    asyncio.run(run())


def test_second_of_two_concurrent_changes_is_rejected(tmp_path: Path):
    async def run() -> None:
        one, other = catalog(tmp_path), catalog(tmp_path)
        await make(one, "First.")
        await other.refresh()
        mine, theirs = one.find("s", EVERYBODY), other.find("s", EVERYBODY)
        await one.replace(mine, source("Mine."), reuse="modular", positions=None, if_match=None)
        with raises("version_mismatch", BodyError) as error:
            await other.replace(theirs, source("Theirs."), reuse="modular", positions=None, if_match=None)
        assert error.value.status == 409
        with raises("version_mismatch", BodyError):
            await other.remove(theirs, if_match=None)
        await other.refresh()
        assert "Mine." in str(other.find("s", EVERYBODY).source.document())
        assert other.find("s", EVERYBODY).etag == one.find("s", EVERYBODY).etag

    asyncio.run(run())


def test_startup_schemas_continue_kept_versions(tmp_path: Path):
    async def run() -> None:
        first, same, changed = (Schema.from_string(f"<schema name='docs'>{text}</schema>") for text in "AAB")
        for schema, version in ((first, 1), (same, 1), (changed, 2)):
            one = catalog(tmp_path)
            await one.refresh()
            assert (await one.publish(schema)).version == version

    asyncio.run(run())
