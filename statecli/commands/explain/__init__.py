"""The command explain: the cause why a checkpoint does not load into a class, and lines of Python that do."""
