"""Shared nouns of all packages: state, findings, errors, dtypes, and text safe to print."""
