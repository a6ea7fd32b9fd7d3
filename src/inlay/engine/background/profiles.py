"""Deviation profiles: how much each token of a module changes behind other text.

A profile is kept by its segment's key, while the segment's KV may be evicted and return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

#: Limit in tokens, 2 bytes each; the least recently used profiles go first.
_MOST_TOKENS = 2**22


#: The deviation of each token of one segment, (tokens,), relative to the size of its values.
Profile = npt.NDArray[np.float16]


class KnownProfiles(Mapping[bytes, Profile]):
    """Profiles, (tokens,), by segment key. ``version`` changes with them; ``tokens`` counts all of them."""

    def __init__(self, most: int = _MOST_TOKENS) -> None:
        self._by_key: dict[bytes, Profile] = {}
        self._most = most
        self.version = self.tokens = 0

    @classmethod
    def of(cls, stored: Iterable[tuple[bytes, bytes]]) -> KnownProfiles:
        """Return profiles read from disk: keys and numbers in fp16. Of profiles above the limit, the last ones stay."""
        known = cls()
        for key, deviations in stored:
            profile = np.frombuffer(deviations, "<f2").astype(np.float16)
            if np.isfinite(profile).all():
                known.add(key, profile)
        return known

    def __getitem__(self, key: bytes) -> Profile:
        found = self._by_key.pop(key)
        self._by_key[key] = found  # moves it to the most recent end
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[bytes]:
        return iter(tuple(self._by_key))  # a copy, because lookups reorder the dict

    def __len__(self) -> int:
        return len(self._by_key)

    def forget_modules(self, keys: Iterable[bytes]) -> None:
        """Forget the profiles of these segments."""
        gone = [self._by_key.pop(key) for key in keys if key in self._by_key]
        self.tokens -= sum(profile.size for profile in gone)
        self.version += bool(gone)

    def forget_salt(self, salt: str) -> None:
        """Do nothing: profiles belong to modules."""

    def add(self, key: bytes, profile: Profile) -> None:
        """Store a profile, and drop the least recently used ones above the limit."""
        before = self._by_key.pop(key, None)
        self._by_key[key] = profile
        self.tokens += profile.size - (0 if before is None else before.size)
        while self.tokens > self._most:
            self.tokens -= self._by_key.pop(next(iter(self._by_key))).size
        self.version += 1
