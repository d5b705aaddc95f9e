"""Callbacks for training loops: Lightning, transformers and accelerate. Each is imported by its own module."""
