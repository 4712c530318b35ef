"""The OpenAI and Anthropic formats, as far as the router reads and writes them."""
