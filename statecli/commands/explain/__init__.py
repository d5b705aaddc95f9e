"""The command explain: the cause why a checkpoint does not load into a class, and the lines of Python that load it."""
