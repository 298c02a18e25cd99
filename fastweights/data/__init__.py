"""Text files to token files to packed batches."""
