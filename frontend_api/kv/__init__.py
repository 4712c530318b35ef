"""Where KV lies: the engines' events, the index made of them, and how far that is known."""
