"""The ways to bound |f − network| on cells, one file for each."""
