"""The folder in which Django looks for management commands."""
