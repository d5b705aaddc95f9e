"""Who does the work on tensor values: `pool` has the tasks done, `executors` are engines on other machines."""
