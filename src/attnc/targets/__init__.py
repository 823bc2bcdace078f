"""Targets: functions that can be compiled. A source (text, a callable) becomes a Target."""
