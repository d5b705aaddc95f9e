"""`statecli bisect`: find the first checkpoint of a run where a condition holds, and read few checkpoints."""
