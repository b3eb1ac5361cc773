"""`python -m cyxtrain.launch ...` is `cyxtrain launch ...` without an installed script."""

from __future__ import annotations

import os
import sys

from cyxtrain.launch.command_line import main

if __name__ == "__main__":
    # Besides process_env.py, this and cyxtrain/__main__.py read os.environ: to pass it on to processes that they start.
    sys.exit(main(["launch", *sys.argv[1:]], dict(os.environ)))
