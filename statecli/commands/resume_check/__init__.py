"""`statecli resume-check`: run a training script with and without an interruption, and name the state that is lost."""
