"""What all packages use: errors, settings, output, text edits, tracked file access, and the loading of extensions."""
