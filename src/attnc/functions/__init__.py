"""Elementary functions: one record for each holds its value, range, slope, jet, kinks, asymptotes and gate."""
