"""Who does the work on values: executors, and shards that run as separate commands."""
