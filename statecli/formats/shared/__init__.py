"""What several readers share: companion JSON files, rank folders, settings, arrays, DCP and DeepSpeed metadata."""
