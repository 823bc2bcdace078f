"""Softmax attention, compiled from mathematics."""
