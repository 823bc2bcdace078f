from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.ir import Mask
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.sparse import Sparse

segments = st.lists(st.integers(EVERY_QUERY, 3), min_size=1, max_size=8).map(np.array)


@settings(deadline=None)
@given(segments, segments)
def test_a_mask_counts_what_it_shows(query_segments, key_segments):
    mask = Mask(query_segments, key_segments)
    visible = mask.visible(np.arange(len(query_segments)), slice(None))
    for q, k in np.ndindex(visible.shape):
        assert visible[q, k] == (key_segments[k] in (EVERY_QUERY, query_segments[q]))
    assert mask.num_visible().tolist() == visible.sum(axis=1).tolist()
    assert (mask.visible(np.array([0]), slice(1, 3)) == visible[:1, 1:3]).all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_sparse_tensor_is_its_dense_one(seed, rank):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(0, 4, 4).tolist())
    dense = rng.integers(-1, 2, shape).astype(np.float64)
    sparse = Sparse.from_dense(dense)
    assert (sparse.dense() == dense).all()
    assert sparse.num_nonzeros == np.count_nonzero(dense)
    rows = int(np.prod(shape[:rank]))
    assert (sparse.matrix(rank).toarray() == dense.reshape(rows, int(np.prod(shape[rank:])))).all()
    assert sparse.astype(np.float32).values.dtype == np.float32
