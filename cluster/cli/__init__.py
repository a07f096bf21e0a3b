"""The `tandem` command: one small module per family of subcommands, heavy imports inside the commands that need them."""

from cluster.cli.app import main

__all__ = ["main"]
