"""The engine's token ids of a request, and the proof that they are."""
