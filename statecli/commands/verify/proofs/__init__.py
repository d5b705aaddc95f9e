"""A module for each proof."""
