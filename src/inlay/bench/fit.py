"""Polynomials through measured points, and how well they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def fit(points: Sequence[tuple[float, float]], degree: int) -> dict[str, Any] | None:
    """The least-squares polynomial of (x, y) points; None where there are no more points than coefficients.

    Returns coefficients, the constant one first, and R², the share of the variance that the polynomial explains.
    """
    if len({x for x, _ in points}) <= degree + 1:
        return None
    x, y = np.array(points, dtype=np.float64).T
    coefficients = np.polyfit(x, y, degree)
    left = y - np.polyval(coefficients, x)
    spread = float(((y - y.mean()) ** 2).sum())
    explained = 1 - float((left**2).sum()) / spread if spread else 1.0
    return {"degree": degree, "coefficients": [float(c) for c in coefficients[::-1]], "r2": round(explained, 6)}
