"""Code that several readers share: config files, rank folders, arrays, DCP and DeepSpeed metadata."""
