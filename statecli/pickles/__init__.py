"""The pickle machine: opcodes are read into a graph, and nothing is imported or run."""
