"""Tests of the code's shape: import arrows, purity, sizes, public names. They read the source; only the tests of the
public names run it."""
