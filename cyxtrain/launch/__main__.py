"""`python -m cyxtrain.launch ...` is `cyxtrain launch ...`, without a script on the path."""

from __future__ import annotations

import os
import sys

from cyxtrain.launch.command_line import main

if __name__ == "__main__":
    # As cyxtrain/__main__.py, a place besides process_env.py that reads os.environ: not to learn anything from it, but
    # because whoever starts processes has to pass an environment on.
    sys.exit(main(["launch", *sys.argv[1:]], dict(os.environ)))
