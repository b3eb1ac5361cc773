"""The same objects under the name that guides use: `import cyxtrain.distributed as dist`."""

from cyxtrain import *  # noqa: F403
from cyxtrain import __all__ as __all__
