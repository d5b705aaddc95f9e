"""Pickle reader of statecli (the pickle machine): it builds a graph from the opcodes and runs nothing."""
