"""Targets typed by the user: a file, a folder, a URL, a class; expanded, located and loaded."""
