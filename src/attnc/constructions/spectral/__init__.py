"""Equally spaced anchors at a moderate temperature, their values solved: one axis, and the search for a grid."""
