"""Constructions of our own, one file each."""
