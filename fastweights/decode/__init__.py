"""The decode engine: generates tokens with a converted model at constant time and memory per token."""
