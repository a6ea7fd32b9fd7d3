"""placeholder"""
QUANTIZATIONS = {}
