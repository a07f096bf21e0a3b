"""Shared by the frontend's tests: sequences to parse, oracles, fakes of the router."""
