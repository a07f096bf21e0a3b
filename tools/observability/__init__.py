"""Grafana dashboard, alert rules and metrics reference, each made from one Python definition.

`python -m tools.observability` writes them.
"""
