"""What loading one pickle, or code next to it, would run, allocate or hash."""
