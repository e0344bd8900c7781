"""What lies around a file: launch configs and lines, modules of the same tree, requirements."""
