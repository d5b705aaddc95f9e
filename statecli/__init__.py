"""statecli: see, prove and audit the state of PyTorch models and checkpoints."""

__version__ = "0.1.0"
