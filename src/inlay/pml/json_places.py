"""Where something stands in JSON: a path of keys and indices, with the names of modules in it."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.problems import quote


@dataclass(frozen=True, slots=True)
class JSONPlace(Place):
    """A place in JSON, as in ``trip.json: content[1].user.content[0].module "plan".len``."""

    path: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source

    def key(self, key: str) -> JSONPlace:
        """The value of a key of this object."""
        return self._longer(f".{key}" if self.path else key)

    def index(self, index: int) -> JSONPlace:
        """A member of this list."""
        return self._longer(f"[{index}]")

    def named(self, kind: str, name: str) -> JSONPlace:
        """This very object, with what it is and what it is called."""
        return self.key(f"{kind} {quote(name)}")

    def _longer(self, part: str) -> JSONPlace:
        return JSONPlace(self.source, path=self.path + part)


def whereabouts(place: Place) -> str:
    """The place within its source, as a part of a sentence."""
    return f"at {place.path}" if isinstance(place, JSONPlace) else f"in line {place.line}"
