"""Ranks that are killed, at chosen points and at any time, and what the others say:
docs/explanation/reliability.md."""
