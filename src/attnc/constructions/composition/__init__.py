"""A composition: the head of each part, and the errors of all of them."""
