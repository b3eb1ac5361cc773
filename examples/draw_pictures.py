"""Draw the plots of docs/: the history of a fit, its confusion matrix, and TensorBoard's page.

Run it:

    pip install '.[plot]' playwright && playwright install chromium
    python examples/draw_pictures.py

Expect history.png, confusion_matrix.png and tensorboard.png in examples/pictures/, after half a minute. To use an
installed Chromium: `--chromium /usr/bin/chromium`.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

FOLDER = Path(__file__).parent / "pictures"
FLAGS = ["--no-sandbox", "--single-process", "--no-zygote", "--use-gl=angle", "--use-angle=swiftshader"]
"""For machines without a screen or a GPU: TensorBoard draws its curves with WebGL."""


def train(logs: str) -> cx.TrainingHistory:
    (x_train, y_train), test = load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    matrix = cx.metrics.ConfusionMatrix(FOLDER / "confusion_matrix.png")
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler="cosine", metrics=[matrix])
    board = cx.callbacks.TensorBoard(logs, update_freq=10)
    return trainer.fit(x_train, y_train, *test, epochs=20, effective_batch_size=32, warmup_steps=50, callbacks=[board])


def photograph(logs: str, path: Path, chromium: str | None) -> None:
    """Start TensorBoard, take a screenshot of it in a browser, and stop it."""
    from playwright.sync_api import sync_playwright

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    board = [sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(board, **quiet) as process, sync_playwright() as player:
        try:
            browser = player.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            for _ in range(120):
                with socket.socket() as there:
                    if there.connect_ex(("127.0.0.1", port)) == 0:
                        break
                page.wait_for_timeout(500)
            page.goto(f"http://127.0.0.1:{port}/#timeseries")
            page.wait_for_selector("scalar-card line-chart", timeout=60_000)
            page.get_by_role("button", name="Settings").first.click()  # hide the settings, for more room
            page.wait_for_timeout(5000)  # wait until all curves are drawn
            page.screenshot(path=path)
            browser.close()
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the plots of docs/.")
    parser.add_argument("--chromium", help="the browser to use; default: the one that playwright has installed")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        train(logs).plot(FOLDER / "history.png")
        photograph(logs, FOLDER / "tensorboard.png", arguments.chromium)


if __name__ == "__main__":
    main()
