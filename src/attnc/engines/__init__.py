"""Engines run programs: Program × inputs → outputs."""
