"""The router: serves OpenAI traffic from a FleetSnapshot held in memory. No Django, no database, no ASGI layer."""
