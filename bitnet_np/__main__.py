"""`python -m bitnet_np`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
