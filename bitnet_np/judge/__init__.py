"""Verdicts on another engine's numbers."""
