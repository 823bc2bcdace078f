"""Modules that constructions share: partitions, fits of values, searches, circuits and gates."""
