"""Fits, against points of known curves and against least squares by normal equations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay_lab.bench.stock import fit


def test_a_parabola_is_found():
    found = fit([(x, 2 + 3 * x + 0.5 * x * x) for x in (0, 1, 2, 5, 9)], 2)
    assert found is not None
    assert found["coefficients"] == pytest.approx([2, 3, 0.5])
    assert found["r2"] == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-50, 50)), min_size=4, unique_by=lambda point: point[0]))
def test_line_is_the_least_squares_fit(points):
    found = fit(points, 1)
    assert found is not None
    x, y = np.array(points, float).T
    matrix = np.stack((np.ones_like(x), x), 1)
    expected = np.linalg.solve(matrix.T @ matrix, matrix.T @ y)
    assert found["coefficients"] == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    if y.std() > 0:
        assert found["r2"] == pytest.approx(float(np.corrcoef(x, y)[0, 1] ** 2), abs=1e-5)


@pytest.mark.parametrize(("points", "degree"), [([], 1), ([(1, 1), (2, 2)], 1), ([(1, 1), (2, 2), (3, 9)], 2)])
def test_no_curve_through_as_many_points_as_coefficients(points, degree):
    assert fit(points, degree) is None


def test_points_at_one_x_have_no_curve():
    assert fit([(1, 1), (1, 2), (1, 3), (1, 4)], 1) is None
