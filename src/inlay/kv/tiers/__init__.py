"""Where keys and values lie that are not in the pool: one file a tier, behind the protocol of tier.py."""
