"""How far what an engine computes may be from what is exact, read off the weights."""
