"""Lightning's Trainer with its own DDP over a backend: `unchanged_lightning.py BACKEND FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain  # noqa: F401 - it registers the backend "ring"


class Regression(lightning.LightningModule):  # type: ignore[misc]  # mypy does not read Lightning: it is optional
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.BatchNorm1d(31), torch.nn.Linear(31, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(backend: str, folder: Path) -> None:
    lightning.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(64, 13), torch.randn(64, 1)), batch_size=8, shuffle=True)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model, loader)
    assert (dist.get_backend(), dist.get_world_size()) == (backend, 2)
    found = model.state_dict() | {"loss": trainer.callback_metrics["loss"]}
    torch.save(found, folder / f"{backend}{trainer.global_rank}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
