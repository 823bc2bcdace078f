"""A box cut into cells, one of which a softmax selects: grids, and leaves of many sizes."""
