"""Profiles that ship with the project, and how the H200 ones were derived."""
