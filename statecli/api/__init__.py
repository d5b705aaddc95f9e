"""The same commands from Python: arguments in, results out."""
