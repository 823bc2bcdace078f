"""Attention heads of other people's models: how surely they select one key, proven from their weights."""

from attnc.heads.report import HeadReport, certify_heads
from attnc.heads.selecting import SelectionClaim

__all__ = ["HeadReport", "SelectionClaim", "certify_heads"]
