"""Mutation check: the package is broken on purpose, one small edit at a time, and the tests must notice."""
