"""Findings and what they rest on: laws of depth, theory, and the rule for all tables."""
