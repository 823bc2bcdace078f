"""The layer that the first paper is built on: heads that truncate, and the bumps that they make."""
