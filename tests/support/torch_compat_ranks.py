"""A rank that trains where cyxtrain finds none of the names given: a script of test_torch_compat.py; no pytest here."""

from __future__ import annotations

import pkgutil
import sys
from typing import Any

_HIDDEN = frozenset(sys.argv[1:])
_resolve_name = pkgutil.resolve_name


def resolve_name(name: str) -> Any:
    """Finds what is not hidden."""
    if name in _HIDDEN:
        raise AttributeError(name)
    return _resolve_name(name)


def main() -> None:
    """Trains with buffers, an average and a look for NaN, and prints every bit of the outcome, and a compiled sum."""
    pkgutil.resolve_name = resolve_name
    import torch
    from fitting import fingerprint, make_model, make_rows

    import cyxtrain as cx

    with cx.init():
        for make in (torch.optim.AdamW, torch.optim.SGD):
            model = make_model().append(torch.nn.BatchNorm1d(3))
            optimizer = make(model.parameters(), 0.1)
            average = cx.callbacks.EMA(decay=0.5)
            trainer = cx.DistributedTrainer(model, torch.nn.CrossEntropyLoss(), optimizer, callbacks=[average])
            trainer.fit(*make_rows(40), epochs=2, batch_size=4, verbose=False, on_nonfinite="skip")
            print(fingerprint(model))
        tensor = torch.full((3,), cx.get_rank() + 1.0)
        torch.compile(lambda t: cx.all_reduce(t), backend="eager")(tensor)
        print(*tensor.tolist())


if __name__ == "__main__":
    main()
