"""The pickle machine: statecli's own pickle reader, which builds a graph from the opcodes and runs nothing."""
