"""The command line. It parses arguments, calls the library and prints."""

from fastweights.cli.app import main

__all__ = ["main"]
