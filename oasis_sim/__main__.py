"""`python -m oasis_sim`."""

from oasis_sim.cli import main

if __name__ == "__main__":
    main()
