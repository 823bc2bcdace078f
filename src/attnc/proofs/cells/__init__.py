"""Dyadic cells of a box, and branch and bound over them."""
