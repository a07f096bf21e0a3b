"""What every part of Tandem shares: errors, config, request types, KV geometry, block ownership and the wire protocol.

Imports nothing of ours and neither torch nor ray, so that the router and the frontend stay light.
"""
