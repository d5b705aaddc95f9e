"""Targets that the user types (a file, a folder, a URL, a class): expand, locate and load them."""
