"""`statecli bisect`: find the first checkpoint of a run where a condition holds, by reading only a few checkpoints."""
