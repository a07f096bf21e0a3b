"""The gRPC router: checks requests, chooses a pair of pools, queues, drives both legs and streams tokens back.

Imports neither torch nor ray. `choice.py` and `queue.py` are pure; everything else runs on one asyncio loop.
"""
