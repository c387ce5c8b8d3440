"""`python -m treedraft` is the `treedraft` command."""

from treedraft.cli.app import main

main()
