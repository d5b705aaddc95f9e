"""The command inspect: the tensors of one target, and findings about them."""
