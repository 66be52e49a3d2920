"""Builds the site: python docs/builder (or make docs)."""
