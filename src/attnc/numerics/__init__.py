"""Outward rounding, intervals and the ledger of a bound: small, and trusted by everything above."""
