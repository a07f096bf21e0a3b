"""Requests to come: read from public trace formats or drawn at random. Pure; used by the simulator, the planner and `tandem bench`."""
