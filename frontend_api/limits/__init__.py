"""What a key may use, counted once over all routers."""
