"""Find the calls, allocations and hashes caused by loading a pickle or the code next to a pickle."""
