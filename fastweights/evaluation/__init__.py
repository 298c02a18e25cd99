"""Perplexity, recall probes, lm-eval tasks and the ranking of layers."""
