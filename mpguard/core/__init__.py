"""What all rooms use: errors, settings, output, text edits, tracked file access, and the loading of extensions."""
