"""`python -m fastweights`, and so `torchrun -m fastweights train`."""

from fastweights.cli import main

main()
