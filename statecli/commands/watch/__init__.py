"""`statecli watch`: wait for checkpoints of a training run, and measure each one when it is finished."""
