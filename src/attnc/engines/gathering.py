"""A mask as gathering: which queries see which keys, so that no score of a hidden key is computed."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from attnc.ir.layers import EVERY_QUERY
from attnc.ir.normal_form import FoldedHead


def positions(segments: np.ndarray) -> dict[int, np.ndarray]:
    """The positions of each segment."""
    order = np.argsort(segments, kind="stable")
    found, starts = np.unique(segments[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, starts[1:]), strict=False))  # without segments, split still has one


def visible_keys(query_segments: np.ndarray, key_segments: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(queries, keys) of every segment: these queries see these keys."""
    own, none = positions(key_segments), np.zeros(0, np.int64)
    shared = own.pop(EVERY_QUERY, none)
    found = positions(query_segments).items()
    return [(queries, np.concatenate([shared, own.get(segment, none)])) for segment, queries in found]


class QueryPieces:
    """The queries of a head in pieces, each with the keys that it sees: about `most` scores, and no hidden ones."""

    def __init__(self, head: FoldedHead, most: int) -> None:
        self._most = most
        self.keys, self.values, self.shared = head.keys, head.values, np.zeros(0, np.int64)
        groups: list[tuple[np.ndarray, np.ndarray]] = []
        if head.query_segments is not None and head.key_segments is not None:
            self.shared = np.flatnonzero(head.key_segments == EVERY_QUERY)
            groups = _by_segment(head.query_segments, head.key_segments)
            if len(groups) == 1 and len(groups[0][0]) == 1:  # all queries see the same keys: keep those alone
                visible = np.sort(np.concatenate([self.shared, groups[0][1][0]]))
                self.keys, self.values, groups = self.keys.rows(visible), self.values.rows(visible), []
        self.pieces: list[tuple[np.ndarray, np.ndarray | None]] = []
        d_k, d_v = self.keys.shape[1], self.values.shape[1]
        self.cells_per_point = head.queries.shape[0] * (2 * d_k + d_v)
        for queries, own in groups:
            num_keys = len(self.shared) + own.shape[1]
            self.cells_per_point += len(own) * num_keys * (2 * queries.shape[1] + d_k + d_v)
            step = max(1, self._most // (num_keys * queries.shape[1]))
            for start in range(0, len(own), step):
                self._add(queries[start : start + step], own[start : start + step], num_keys)
        if not groups:
            num_keys = self.keys.shape[0]
            self.cells_per_point += 2 * head.queries.shape[0] * num_keys
            self.cells_per_point += 0 if self.keys.is_constant else num_keys * d_k
            self.cells_per_point += 0 if self.values.is_constant else num_keys * d_v
            self._add(np.arange(head.queries.shape[0]), None, num_keys)

    def _add(self, queries: np.ndarray, own: np.ndarray | None, num_keys: int) -> None:
        step = max(1, self._most // num_keys)
        for start in range(0, queries.shape[-1], step):
            self.pieces.append((queries[..., start : start + step], own))


def _by_segment(query_segments: np.ndarray, key_segments: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(queries, own keys) of the segments, one per row; segments with equally many of both stand in one array."""
    keys_of = positions(key_segments)
    keys_of[EVERY_QUERY] = np.zeros(0, np.int64)
    has_own = np.isin(query_segments, key_segments)  # the other queries see the shared keys alone, and are all alike
    alike = defaultdict(list)
    for segment, queries in positions(np.where(has_own, query_segments, EVERY_QUERY)).items():
        alike[len(queries), len(keys_of[segment])].append((queries, keys_of[segment]))
    return [(np.stack([q for q, _ in group]), np.stack([k for _, k in group])) for group in alike.values()]
