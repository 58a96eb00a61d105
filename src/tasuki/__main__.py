"""`python -m tasuki` is the `tasuki` command, for environments whose scripts folder is not on PATH."""

from tasuki.cli.main import main

if __name__ == "__main__":
    main()
