"""Experiments, one per file: each module here defines `EXPERIMENT`, and `attnc_lab.catalogue` finds it."""
