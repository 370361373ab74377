"""`python -m mstar.cli`: the `mstar` command where it is not on the path."""

from mstar.cli import main

main()
