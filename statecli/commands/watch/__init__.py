"""`statecli watch`: wait for checkpoints of a training run, and measure each finished checkpoint."""
