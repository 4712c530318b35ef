"""The vocabulary that the control plane, the node agents and the router share.

Pure: standard library and msgspec only, and no IO except `config` (environment and secret files).
"""
