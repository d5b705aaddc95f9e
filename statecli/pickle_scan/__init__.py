"""Find the calls, allocations and hashes caused by loading one pickle or the code next to a pickle."""
