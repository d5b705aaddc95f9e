"""The options of each command, checked and turned into the request that its run takes."""
