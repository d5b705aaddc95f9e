"""Callbacks for training loops: Lightning and transformers. Each is imported by its own module."""
