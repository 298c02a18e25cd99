"""Recovering quality: recipes, losses, the trainer and its checkpoints."""
