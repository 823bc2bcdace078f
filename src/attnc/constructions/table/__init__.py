"""One head for a table: keys on the axes of a grid or at its points, and how far off it is in its own arithmetic."""
