"""Files, progress, provenance and errors: what every other package may use."""
