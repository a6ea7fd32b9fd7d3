"""A schema's name refers to the tenant's own schema, else to the public one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inlay.prompt.contexts import PUBLIC, SchemaRegistry

NAMES, OWNERS = st.sampled_from("xyz"), st.sampled_from([PUBLIC, "ann", "bob"])


@given(st.lists(st.tuples(NAMES, OWNERS, st.one_of(st.none(), st.integers())), max_size=30))
def test_name_refers_to_the_private_schema_first(changes):
    registry: SchemaRegistry[int] = SchemaRegistry()
    expected: dict[tuple[str, str], int] = {}
    for name, owner, known in changes:
        if known is None:
            assert registry.remove(name, owner) == expected.pop((owner, name), None)
        else:
            registry.put(name, owner, known)
            expected[owner, name] = known
    assert len(registry) == len(expected)
    for owner in (PUBLIC, "ann", "bob"):
        meant = {name: registry.find(name, owner) for name in "xyz"}
        assert meant == {name: expected.get((owner, name), expected.get((PUBLIC, name))) for name in "xyz"}
        assert registry.visible(owner) == {name: known for name, known in meant.items() if known is not None}
        assert sorted(registry.of(owner)) == sorted(known for (of, _), known in expected.items() if of == owner)
        assert all(registry.get(name, owner) == expected.get((owner, name)) for name in "xyz")
