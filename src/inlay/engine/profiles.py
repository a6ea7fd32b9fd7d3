"""How much each token of a module moves when other text stands before it, as far as that is known.

A profile is kept beside its segment, under the segment's key, whose KV may go and come back meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

#: So many tokens' figures are kept at most, 2 bytes each; those that were unused for longest go first.
_MOST_TOKENS = 2**22


#: How much each token of one segment moves, (tokens,), as a share of how large its values are.
Profile = npt.NDArray[np.float16]


class KnownProfiles(Mapping[bytes, Profile]):
    """Profiles, (tokens,), by the key of their segment. version: changes with them. tokens: of all of them."""

    def __init__(self, most: int = _MOST_TOKENS) -> None:
        self._by_key: dict[bytes, Profile] = {}
        self._most = most
        self.version = self.tokens = 0

    def __getitem__(self, key: bytes) -> Profile:
        found = self._by_key.pop(key)
        self._by_key[key] = found  # the one used last
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[bytes]:
        return iter(tuple(self._by_key))  # looking one up moves it

    def __len__(self) -> int:
        return len(self._by_key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget profiles."""
        gone = [self._by_key.pop(key) for key in keys if key in self._by_key]
        self.tokens -= sum(profile.size for profile in gone)
        self.version += bool(gone)

    def add(self, key: bytes, profile: Profile) -> None:
        """Keep a profile, and let others go where there are too many."""
        before = self._by_key.pop(key, None)
        self._by_key[key] = profile
        self.tokens += profile.size - (0 if before is None else before.size)
        while self.tokens > self._most:
            self.tokens -= self._by_key.pop(next(iter(self._by_key))).size
        self.version += 1
