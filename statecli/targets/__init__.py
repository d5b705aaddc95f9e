"""What a user typed: a file, a folder, a URL, a class; expanded, located and loaded."""
