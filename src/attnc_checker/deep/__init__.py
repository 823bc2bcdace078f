"""Programs of several stages."""
