"""Workers on tensor values: `pool` runs the tasks, `executors` are engines on other machines."""
