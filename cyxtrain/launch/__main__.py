"""`python -m cyxtrain.launch NUM_RANKS COMMAND...`: see `--help`."""

from __future__ import annotations

import os
import sys

from cyxtrain.launch.local import main

if __name__ == "__main__":
    # The one place besides environment.py that reads os.environ: not to learn anything from it,
    # but because whoever starts processes has to pass an environment on.
    sys.exit(main(sys.argv[1:], dict(os.environ)))
