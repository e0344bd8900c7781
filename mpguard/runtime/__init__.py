"""The policy at run time: injection and proof."""
