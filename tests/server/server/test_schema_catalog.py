"""The registry of schemas: versions, owners and limits, under concurrent changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inlay import Schema
from inlay.api.failures import BodyError
from inlay.errors import CapacityError
from inlay.server.limits import EVERYBODY, Tenant
from inlay.server.schema_catalog import SchemaCatalog, SchemaQuotas
from inlay.server.schema_record import SchemaSource, of_schema
from tests.raising import raises

ANN, BOB = Tenant("ann", "a"), Tenant("bob", "b")
ROOT = Tenant("root", "r", admin=True)


def source(name: str = "s", text: str = "Some text.") -> SchemaSource:
    return of_schema(Schema.from_json({"name": name, "content": [{"module": "m", "content": text}]}))


@dataclass
class Library:
    """A model, as far as the registry uses one: knows schemas, and encodes them in steps that a test lets it take."""

    schemas: dict[tuple[str | None, str], Schema] = field(default_factory=dict)
    steps: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(10**6))
    failure: Exception | None = None
    encoded: int = 0

    @property
    def local(self) -> Any:
        """Nothing is pinned by key."""
        none: Future[list[Any]] = Future()
        none.set_result([])
        return SimpleNamespace(pinned=lambda owner: none)

    async def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        cache_salt: str | None = None,
        replace: bool = False,
        ttl: str | None = None,
        tenant: str = "",
    ) -> Any:
        await asyncio.sleep(0)
        if encode:
            await self.steps.acquire()
        self.schemas[cache_salt, schema.name] = schema
        if encode and progress is not None:
            self.encoded += 1
            for done in (1, 2, 3):
                await self.steps.acquire()
                if self.failure is not None:
                    raise self.failure
                progress(done, 3)
        return SimpleNamespace(schema=schema, runs=(), length=0)

    def remove_schema(self, name: str, *, cache_salt: str | None = None) -> bool:
        return self.schemas.pop((cache_salt, name), None) is not None


def run(use: Callable[[SchemaCatalog, Library], Coroutine[Any, Any, None]], **limits: int) -> None:
    async def whole() -> None:
        library = Library()
        await use(SchemaCatalog(library, SchemaQuotas(**limits)), library)  # type: ignore[arg-type]

    asyncio.run(whole())


async def create(registry: SchemaCatalog, given: SchemaSource | None = None, salt: str | None = None) -> Any:
    return await registry.create(given or source(), salt=salt, reuse="anchored", positions=None)


def test_only_one_of_several_conditional_changes_is_made():
    async def use(registry: SchemaCatalog, library: Library) -> None:
        first = await create(registry)

        async def change(text: str) -> Any:
            return await registry.replace(first, source(text=text), reuse=None, positions=None, if_match=first.etag)

        texts = [f"Text {n}." for n in range(9)]
        ended = await asyncio.gather(*map(change, texts), return_exceptions=True)
        made = [text for text, end in zip(texts, ended, strict=True) if not isinstance(end, BodyError)]
        assert [end.status for end in ended if isinstance(end, BodyError)] == [412] * 8
        assert len(made) == 1
        assert made[0] in library.schemas[None, "s"].to_json()
        assert registry.find("s", EVERYBODY).source.schema is library.schemas[None, "s"]

    run(use)


@pytest.mark.parametrize("if_match", [None, "*", "1", '"1"', '"x", 1', "ETAG", '"0", ETAG'])
def test_matching_if_match_is_accepted(if_match):
    async def use(registry: SchemaCatalog, library: Library) -> None:
        entry = await create(registry)
        said = None if if_match is None else if_match.replace("ETAG", entry.etag)
        await registry.remove(entry, if_match=said)
        assert not library.schemas
        assert len(registry) == 0

    run(use)


@pytest.mark.parametrize("if_match", ["", "2", "01", 'W/"1"', '"x"', "1-"])
def test_other_if_match_changes_nothing(if_match):
    async def use(registry: SchemaCatalog, library: Library) -> None:
        entry = await create(registry)
        with raises("version_mismatch", BodyError, field="If-Match") as caught:
            await registry.remove(entry, if_match=if_match)
        assert caught.value.status == 412
        assert registry.find("s", EVERYBODY) is entry
        assert library.schemas

    run(use)


def test_recreated_schema_has_a_new_etag():
    async def use(registry: SchemaCatalog, library: Library) -> None:
        before = await create(registry)
        await registry.remove(before, if_match=None)
        after = await create(registry)
        assert (before.version, after.version) == (1, 1)
        assert before.etag != after.etag

    run(use)


def test_list_of_past_versions_is_bounded():
    async def use(registry: SchemaCatalog, library: Library) -> None:
        entry = await create(registry)
        for n in range(6):
            entry = await registry.replace(entry, source(text=f"Text {n}."), reuse=None, positions=None, if_match=None)
        assert [one.version for one in entry.versions] == [5, 6, 7]
        assert len({one.sha256 for one in entry.versions}) == 3

    run(use, versions=3)


def test_limits_are_counted_per_owner():
    async def use(registry: SchemaCatalog, library: Library) -> None:
        size = source().size
        first = await create(registry, salt="a")
        with raises("schema_limit", BodyError) as caught:
            await create(registry, source("t", "x" * size), salt="a")
        assert caught.value.status == 403
        await create(registry, salt="b")
        second = await create(registry, source("t"), salt="a")
        with raises("schema_limit", BodyError, names="2"):
            await create(registry, source("u", ""), salt="a")
        with raises("schema_limit", BodyError):
            await registry.replace(first, source(text="Some text of more"), reuse=None, positions=None, if_match=None)
        assert library.schemas["a", "s"] is first.source.schema
        await registry.replace(first, source(text="Less"), reuse=None, positions=None, if_match=None)
        await registry.remove(second, if_match=None)
        await create(registry, source("u"), salt="a")

    run(use, schemas=2, source_bytes=2 * source().size)


def test_concurrent_warm_calls_share_one_encoding():
    async def use(registry: SchemaCatalog, library: Library) -> None:
        library.steps = asyncio.Semaphore(0)
        entry = await create(registry)
        one, two = await registry.prewarm(entry), await registry.prewarm(entry)
        assert one is two

        async def watch() -> list[tuple[int, int]]:
            return [seen async for seen in one.watch()]

        watchers = [asyncio.create_task(watch()) for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
            library.steps.release()
        for seen in await asyncio.gather(*watchers):
            assert seen == sorted(set(seen))
            assert seen[-1] == (3, 3)
        assert (await one.result()).over
        assert library.encoded == 1
        assert await registry.prewarm(entry) is not one

    run(use)


@pytest.mark.parametrize("steps", range(6))
def test_schema_deleted_while_encoded_stays_deleted(steps):
    async def use(registry: SchemaCatalog, library: Library) -> None:
        library.steps = asyncio.Semaphore(0)
        entry = await create(registry)
        task = await registry.prewarm(entry)
        for _ in range(steps):
            library.steps.release()
            await asyncio.sleep(0)
        removing = asyncio.create_task(registry.remove(entry, if_match=None))
        for _ in range(10):
            await asyncio.sleep(0)
            library.steps.release()
        await removing
        await task.result()
        assert (task.done, task.failure) == (3, None)
        assert not library.schemas

    run(use)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(CapacityError("no room"), 400, "kv_memory_exceeded"), (KeyError("secret"), 500, "internal_error")],
)
def test_failed_encoding_is_reported_and_the_schema_stays(failure, status, code):
    async def use(registry: SchemaCatalog, library: Library) -> None:
        library.failure = failure
        entry = await create(registry)
        task = await (await registry.prewarm(entry)).result()
        assert task.failure is not None
        assert (task.failure.status, task.failure.code) == (status, code)
        assert "secret" not in task.failure.message
        assert [seen async for seen in task.watch()] == []
        library.failure = None
        assert (await (await registry.prewarm(entry)).result()).failure is None
        assert registry.find("s", EVERYBODY) is entry

    run(use)


class Shelf(RuleBasedStateMachine):
    """Random changes by random tenants: each tenant sees its own schemas and the public ones, at their latest
    versions.
    """

    names = st.sampled_from("st")
    salts = st.sampled_from([None, "a", "b", "r"])
    texts = st.sampled_from(["One.", "Two.", "Three."])

    def __init__(self) -> None:
        super().__init__()
        self.library = Library()
        self.registry = SchemaCatalog(self.library)  # type: ignore[arg-type]
        self.loop = asyncio.new_event_loop()
        self.model: dict[tuple[str | None, str], tuple[int, str]] = {}

    def teardown(self) -> None:
        self.loop.close()

    @rule(name=names, salt=salts, text=texts)
    def create(self, name: str, salt: str | None, text: str) -> None:
        made = create(self.registry, source(name, text), salt)
        if (salt, name) in self.model:
            with raises("already_exists", BodyError):
                self.loop.run_until_complete(made)
        else:
            self.loop.run_until_complete(made)
            self.model[salt, name] = (1, text)

    @rule(name=names, tenant=st.sampled_from([ANN, BOB, ROOT]), public=st.sampled_from([None, True, False]), text=texts)
    def replace(self, name: str, tenant: Tenant, public: bool | None, text: str) -> None:
        key = self.meant(name, tenant, public)
        if key is None or (key[0] is None and not tenant.admin):
            with raises("not_found" if key is None else "admin_only", BodyError):
                self.registry.own(name, tenant, public=public)
            return
        before = self.registry.own(name, tenant, public=public)
        change = self.registry.replace(before, source(name, text), reuse=None, positions=None, if_match=before.etag)
        self.loop.run_until_complete(change)
        self.model[key] = (self.model[key][0] + 1, text)

    @rule(name=names, tenant=st.sampled_from([ANN, BOB, ROOT]))
    def remove(self, name: str, tenant: Tenant) -> None:
        key = self.meant(name, tenant, None)
        if key is not None and (key[0] is not None or tenant.admin):
            self.loop.run_until_complete(self.registry.remove(self.registry.own(name, tenant), if_match=None))
            del self.model[key]

    def meant(self, name: str, tenant: Tenant, public: bool | None) -> tuple[str | None, str] | None:
        """The expected schema for a tenant, by another method: the first of these that exists."""
        own, everybodys = (tenant.salt, name), (None, name)
        keys = [own] if public is False else [everybodys] if public else [own, everybodys]
        return next((key for key in keys if key in self.model), None)

    @invariant()
    def every_tenant_sees_its_schemas(self) -> None:
        assert len(self.registry) == len(self.model) == len(self.library.schemas)
        for tenant in (ANN, BOB, ROOT):
            seen = [(entry.name, entry.salt, entry.version) for entry in self.registry.visible(tenant)]
            keys = [key for name in "st" if (key := self.meant(name, tenant, None)) is not None]
            assert seen == [(name, salt, self.model[salt, name][0]) for salt, name in keys]
        for (salt, name), (_, text) in self.model.items():
            assert text in self.library.schemas[salt, name].to_json()


Shelf.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestShelf = Shelf.TestCase
