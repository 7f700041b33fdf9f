"""``python -m kvport`` is the ``kvport`` command."""

from kvport.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
