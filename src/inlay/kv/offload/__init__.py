"""Tiers below the pool: one file per tier, behind the protocol of tier.py."""
