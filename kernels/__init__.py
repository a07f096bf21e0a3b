"""One function per op of gpt-oss. `reference.py` holds the readable fp32 twin (`*_ref`) of each; the modules beside it choose by device.

Called by `model/`; knows shapes and bytes, nothing of requests, pools or peers.
"""
