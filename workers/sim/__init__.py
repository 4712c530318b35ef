"""The stand-in engine: vLLM 0.32's outside without a model, for machines and tests that have none.

Product code, started by the node agent as runtime `sim`: the same HTTP surface, prefill→decode exchange, KV events and
metric names as far as Tandem uses them, held to real vLLM by `tests/contract`. It knows nothing of agents, the control
plane or the router, and needs no torch.
"""
