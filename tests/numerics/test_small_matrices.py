import numpy as np
import pytest

from attnc.numerics.small_matrices import orthonormal_factors, singular_values, triangular_factor


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (40, 8), (200, 40)])
def test_the_results_are_those_of_numpy(rows, columns):
    A = np.random.default_rng(rows).normal(size=(rows, columns))
    U, S, Vt = singular_values(A)
    assert np.abs(U * S @ Vt - A).max() <= 1e-13 * S[0]
    assert np.abs(S - np.linalg.svd(A, compute_uv=False)).max() <= 1e-13 * S[0]
    R = triangular_factor(A)
    assert np.array_equal(R, np.triu(R))
    assert np.abs(R.T @ R - A.T @ A).max() <= 1e-13 * S[0] ** 2
    Q, same = orthonormal_factors(A)
    assert np.array_equal(same, R)
    assert np.abs(Q @ R - A).max() <= 1e-13 * S[0]
    assert np.abs(Q.T @ Q - np.eye(columns)).max() <= 1e-13


def test_a_matrix_that_is_not_finite_is_refused():
    with pytest.raises(np.linalg.LinAlgError):
        singular_values(np.full((3, 3), np.nan))
