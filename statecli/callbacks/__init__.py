"""Callbacks for training loops: Lightning, transformers and accelerate. Each library has its own module here."""
