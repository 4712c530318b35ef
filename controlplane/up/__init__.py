"""`make up`: from nothing to a served model, and down again without a trace.

Starts the programs as processes and talks to them as anyone else would (REST, the OpenAI endpoint); never imports the
router, the agent or Django into its own process.
"""
