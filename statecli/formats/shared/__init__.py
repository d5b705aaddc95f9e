"""Shared code of several readers: config files, rank folders, arrays, DCP and DeepSpeed metadata."""
