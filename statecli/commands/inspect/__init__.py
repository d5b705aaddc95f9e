"""The command inspect: the tensors of one target, and what must be said about them."""
