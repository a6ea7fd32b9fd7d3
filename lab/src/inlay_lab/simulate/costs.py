"""The costs of a simulated replica, measured on one machine or given in a file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from inlay.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one replica. Raises ParameterError.

    Attributes:
        machine: The measured machine.
        prefill_s: Seconds to compute one prompt token.
        pass_s: Fixed seconds of a pass.
        decode_s: Seconds of one answer's token in a pass.
        chunk: Most prompt tokens in a pass.
        pool: Tokens that fit in the pool.
        below: Tokens that fit in the replica's own tier below the pool; 0 for none.
        below_s: Seconds to read a token from that tier.
        shared_s: Seconds to read a token from a shared tier that stores everything; None without one.
    """

    machine: str = "an accelerator of middle size and an 8B model, by rule of thumb"
    prefill_s: float = 1e-4
    pass_s: float = 8e-3
    decode_s: float = 1e-4
    chunk: int = 2048
    pool: int = 200_000
    below: int = 0
    below_s: float = 1e-5
    shared_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("prefill_s", "pass_s", "decode_s", "below_s", "shared_s"):
            value = getattr(self, name)
            if name == "shared_s" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ParameterError(f"costs: {name} is {value!r:.40}; give a number of seconds above 0")
        for name, least in (("chunk", 1), ("pool", 1), ("below", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ParameterError(f"costs: {name} is {value!r:.40}; give a whole number of tokens, at least {least}")

    @classmethod
    def from_file(cls, path: Path) -> Costs:
        """Read a file of ``inlay simulate --calibrate``. Raises ParameterError."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ParameterError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        except ValueError as error:
            raise ParameterError(f"{path}: this is no JSON ({error}); see inlay simulate --calibrate") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(said, dict) or not set(said) <= set(known):
            raise ParameterError(f"{path}: costs are an object with {', '.join(known)}; see inlay simulate --calibrate")
        return cls(**said)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def service_s(self, tokens: float, answer: float) -> float:
        """A replica's seconds for a request with nothing stored, among many running together."""
        return tokens * self.prefill_s + answer * self.decode_s
