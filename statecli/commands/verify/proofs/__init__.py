"""One module per proof."""
