"""Bytes from anywhere: files on disk, behind URLs and in archives, and the names of files in a checkpoint folder."""
