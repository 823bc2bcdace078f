"""The playground: a page in which you type a function and see the attention that computes it. `attnc serve`."""

from attnc_playground.serving import serve

__all__ = ["serve"]
