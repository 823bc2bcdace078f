"""`python -m attnc`, the same program as `attnc`."""

from attnc.cli import main

main()
