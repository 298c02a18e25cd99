"""`python -m fastweights`, and so `torchrun -m fastweights train`."""

from fastweights.cli.app import main

main()
