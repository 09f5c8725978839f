"""`python -m polyfed`, the same as the command `polyfed`."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
