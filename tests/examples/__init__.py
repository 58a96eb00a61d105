"""Tests that the documents are true: every example runs, the drawings are those of the code, links and options exist."""
