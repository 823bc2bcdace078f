"""Proofs that a program is close to a target, and the certificates that state them."""
