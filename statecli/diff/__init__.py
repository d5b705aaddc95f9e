"""`statecli diff`: two states -> what differs."""
