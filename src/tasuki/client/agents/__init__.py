"""The client of node agents."""
