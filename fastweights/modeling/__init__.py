"""The layers that replace attention, the cache, the model families and the registered Hugging Face classes."""
