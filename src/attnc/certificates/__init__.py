"""What is claimed of a program, and what supports the claim."""
