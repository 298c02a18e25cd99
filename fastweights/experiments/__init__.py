"""Many training runs of one model: grids and the runner."""
