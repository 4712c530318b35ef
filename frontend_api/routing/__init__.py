"""Which engines serve a request: the fleet and its loads, costs in seconds, the choice, the line of those who wait."""
