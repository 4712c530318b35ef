"""The node agent and what it runs: real vLLM engines and the stand-in. No Django, no database."""
