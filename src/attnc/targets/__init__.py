"""What can be compiled: a source (text, a callable) becomes a Target."""
