"""What the router costs, measured beside nginx with the same stub engine and the same load: `python -m tests.bench`."""
