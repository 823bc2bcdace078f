"""Expressions: text → tree → values at points, ranges and Taylor polynomials over boxes."""
