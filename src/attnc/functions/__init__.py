"""Elementary functions: one place for each knows its value, range, slope, jet, kinks, asymptotes and gate."""
