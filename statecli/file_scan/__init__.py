"""Find every pickle and every piece of code in a file and scan it."""
