"""`python -m attnc.cli`."""

from attnc.cli import main

main()
