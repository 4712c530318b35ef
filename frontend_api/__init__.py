"""The router: OpenAI-compatible traffic in, engines out. The hot path: no Django, no database, no ASGI layer."""
