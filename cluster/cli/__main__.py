"""`python -m cluster.cli`, the same as `tandem`."""

from cluster.cli import main

main()
