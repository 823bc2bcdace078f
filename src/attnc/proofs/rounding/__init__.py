"""Bounds on the distance of a computed result from the exact one, read off the weights."""
