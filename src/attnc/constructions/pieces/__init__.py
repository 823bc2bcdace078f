"""A function of one variable as smooth pieces: where it bends, and a group of keys for what is between."""
