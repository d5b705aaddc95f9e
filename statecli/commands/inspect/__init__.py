"""The command inspect: the tensors of a target, and findings about them."""
