"""The command `cyxtrain`, also as `python -m cyxtrain` or `torchrun -m cyxtrain`: see `--help`."""

from __future__ import annotations

import os
import sys

from cyxtrain.launch import command_line


def main() -> int:
    """Run this process's command line and return its exit code."""
    return command_line.main(sys.argv[1:], dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
