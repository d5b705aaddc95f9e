"""One module a proof."""
