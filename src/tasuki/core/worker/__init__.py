"""TODO: say what this folder is."""
