"""A server for converted models: the OpenAI API, with conversations that are states of constant size."""
