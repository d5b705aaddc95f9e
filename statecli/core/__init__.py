"""The nouns that every room shares: state, findings, errors, dtypes, and text that is safe to print."""
