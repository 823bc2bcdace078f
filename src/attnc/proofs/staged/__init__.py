"""Proofs head by head: one theorem for compositions, ReLU networks and truncated linear functions."""
