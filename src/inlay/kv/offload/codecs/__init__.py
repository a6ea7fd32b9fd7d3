"""Codecs: the forms of KV in the tiers below the pool, one file each; see docs/guides/cache-tiers.md.

The format of a name never changes while data in it may be read. A new format gets a new name.
"""

from __future__ import annotations

from collections.abc import Mapping

from inlay.kv.offload.codecs import fp8, int8, none
from inlay.kv.offload.codecs.codec import Codec

CODECS: Mapping[str, Codec] = {"none": none, "int8": int8, "fp8": fp8}
