"""What is proved of one cell: each kind of leaf, and the keys and values that can matter there."""
