"""The queries of a head in pieces, for engines that compute whole arrays of scores."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from attnc.ir.normal_form import FoldedHead


class QueryPieces:
    """The queries of a head in pieces, each with the keys that it sees.

    A piece has about `most` scores, none hidden.
    """

    def __init__(self, head: FoldedHead, most: int) -> None:
        self._most = most
        self.keys, self.values, self.shared = head.keys, head.values, np.zeros(0, np.int64)
        groups: list[tuple[np.ndarray, np.ndarray]] = []
        if head.mask is not None:
            self.shared = head.mask.shared
            alike = defaultdict(list)  # groups with equally many queries and keys are stacked
            for queries, own in head.mask.groups():
                alike[len(queries), len(own)].append((queries, own))
            groups = [(np.stack([q for q, _ in group]), np.stack([k for _, k in group])) for group in alike.values()]
            if len(groups) == 1 and len(groups[0][0]) == 1:  # all queries see the same keys: keep those alone
                visible = np.sort(np.concatenate([self.shared, groups[0][1][0]]))
                self.keys, self.values, groups = self.keys.rows(visible), self.values.rows(visible), []
        self.is_shared = not groups  # all queries see all of the keys
        self.pieces: list[tuple[np.ndarray, np.ndarray | None]] = []
        d_k, d_v = self.keys.shape[1], self.values.shape[1]
        self.scores_per_point, self.cells_per_point = 0, head.queries.shape[0] * (2 * d_k + d_v)
        for queries, own in groups:
            num_keys = len(self.shared) + own.shape[1]
            self.scores_per_point += len(own) * num_keys * queries.shape[1]
            self.cells_per_point += len(own) * num_keys * (2 * queries.shape[1] + d_k + d_v)
            step = max(1, self._most // (num_keys * queries.shape[1]))
            for start in range(0, len(own), step):
                self._add(queries[start : start + step], own[start : start + step], num_keys)
        if not groups:
            num_keys = self.keys.shape[0]
            self.scores_per_point = head.queries.shape[0] * num_keys
            self.cells_per_point += 2 * head.queries.shape[0] * num_keys
            self.cells_per_point += 0 if self.keys.is_constant else num_keys * d_k
            self.cells_per_point += 0 if self.values.is_constant else num_keys * d_v
            self._add(np.arange(head.queries.shape[0]), None, num_keys)

    def _add(self, queries: np.ndarray, own: np.ndarray | None, num_keys: int) -> None:
        step = max(1, self._most // num_keys)
        for start in range(0, queries.shape[-1], step):
            self.pieces.append((queries[..., start : start + step], own))
