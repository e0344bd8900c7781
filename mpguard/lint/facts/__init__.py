"""What a Python file says: names, values, guards, regions, events, order. `file.Facts` is what rules ask."""
