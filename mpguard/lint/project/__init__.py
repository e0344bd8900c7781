"""The surroundings of a file: launch configs and lines, modules of the same tree, requirements."""
