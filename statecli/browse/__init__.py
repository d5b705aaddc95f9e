"""`statecli browse`: look at the tensors of a target in the terminal."""
