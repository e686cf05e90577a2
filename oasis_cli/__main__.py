"""`python -m oasis_cli` is the same as `oasis`."""

from oasis_cli.cli import main

if __name__ == "__main__":
    main()
