"""Claims about notebooks, executed as their users do: a kernel, a cell after the other, and a stop button."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import children_of, runs
from lazy import LazyModule
from worlds import wait_until

import cyxtrain as cx

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
nbclient: Any = LazyModule("nbclient")
nbformat: Any = LazyModule("nbformat")
PACKAGE = Path(cx.__file__).parents[1]
EXAMPLES = Path(__file__).parents[3] / "examples"

FIRST = """
import numpy as np, torch, cyxtrain as cx
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    def forward(self, rows):
        return self.layers(rows)

torch.manual_seed(0)
rows = torch.randn(4000, 8)
classes = (rows[:, 0] * rows[:, 1] > 0).long()
net = Net()
trainer = cx.DistributedTrainer(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 1e-2))
config = cx.DistributedTrainingConfig(epochs=2, batch_size=32, num_processes=2)
"""


class Kernel:
    """A notebook's kernel, and what its cells show."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.pid = client.km.provisioner.pid
        self._count = 0

    def run(self, source: str, *, may_fail: bool = False) -> tuple[str, str]:
        """Runs a cell; returns what it has written, and what it shows beside that, or its error."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        self._count += 1
        try:
            self._client.execute_cell(cell, self._count - 1)
        except nbclient.exceptions.CellExecutionError:
            if not may_fail:
                raise
        written, shown = "", ""
        for output in cell.outputs:
            written += output.get("text", "")
            shown += output.get("data", {}).get("text/plain", "") + "\n".join(output.get("traceback", ()))
        return written, re.sub(r"\x1b\[[\d;]*m", "", shown)

    def workers(self) -> list[int]:
        """The workers that run."""
        return [pid for pid in children_of(self.pid) if Path(f"/proc/{pid}/comm").read_text() == "cyxtrain worker\n"]

    def interrupt(self) -> None:
        """What the stop button does."""
        os.kill(self.pid, signal.SIGINT)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> None:
    """A kernel is its own process, and stays for all tests here: `kernel` sees to what is left of it."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGE))
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=100, kernel_name="python3")
        with client.setup_kernel():
            found = Kernel(client)
            found.run(FIRST)
            yield found
            left = found.workers()
        wait_until(lambda: not runs(found.pid))
        wait_until(lambda: not any(map(runs, left)))


@pytest.mark.nightly
def test_a_class_of_the_notebook_is_trained_twice(kernel):
    _, shown = kernel.run("history = trainer.fit(rows, classes, config)")
    lines = shown.splitlines()
    assert lines[0] == "workers    2 processes are starting; they stay for the next calls"
    assert lines[2] == "world      2 ranks"
    assert [line[:9] for line in lines[-2:]] == ["epoch 1/2", "epoch 2/2"]
    before = kernel.workers()
    _, shown = kernel.run("trainer.fit(rows, classes, config)")
    assert "TrainingHistory: 2 epochs" in shown
    assert len(before) == 2
    assert kernel.workers() == before


@pytest.mark.nightly
def test_it_predicts_with_the_weights_that_came_back(kernel):
    written, _ = kernel.run(
        "before = net.eval()(rows).detach()\n"
        "history = trainer.fit(rows, classes, config)\n"
        "loss, accuracy = trainer.evaluate(rows, classes)\n"
        "after = net.eval()(rows).detach()\n"
        "print(torch.equal(trainer.predict(rows), after), trainer.model is net, torch.equal(before, after))\n"
        "print(loss < history.train_losses[0], loss, history.train_losses, accuracy)"
    )
    same, learned = written.splitlines()[-2:]
    assert same == "True True False"
    assert learned.startswith("True"), learned


@pytest.mark.nightly
def test_it_is_interrupted_in_an_epoch_and_goes_on(kernel):
    begun = Path(kernel.run("import os; print(os.getcwd())")[0].strip()) / "begun"
    stop = threading.Thread(target=lambda: (wait_until(begun.exists, 50), kernel.interrupt()))
    stop.start()
    written, shown = kernel.run(
        "class Telling(cx.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        if self.trainer.epoch == epochs + 1 and batch == 3:\n"
        "            open('begun', 'w').close()\n"
        "steps, epochs = trainer.step, trainer.epoch\n"
        "history = trainer.fit(rows, classes, config, epochs=10**6, callbacks=[Telling()])\n"
        "print(len(history.train_losses), trainer.epoch - epochs, trainer.step > steps + 60)"
    )
    stop.join()
    recorded, trained, further = written.splitlines()[-1].split()
    assert (recorded, further) == (trained, "True")
    assert "stopped    after step" in shown.splitlines()[-1]
    assert kernel.workers() == []
    _, shown = kernel.run("trainer.fit(rows, classes, config)")
    assert "TrainingHistory: 2 epochs" in shown


@pytest.mark.nightly
def test_an_error_in_forward_is_shown_as_itself(kernel):
    _, shown = kernel.run(
        "class Broken(Net):\n"
        "    def forward(self, rows):\n"
        "        if cx.get_rank() == 1 and len(rows) > 2:\n"
        "            raise ValueError('the loss is a banana')\n"
        "        return super().forward(rows)\n"
        "cx.DistributedTrainer(Broken(), nn.CrossEntropyLoss()).fit(rows, classes, config)",
        may_fail=True,
    )
    there, _, here = shown.partition("The above exception was the direct cause of the following exception:")
    assert "on rank 1 of 2:" in there
    assert "raise ValueError('the loss is a banana')\nValueError: the loss is a banana" in there.replace("    ", "")
    assert "ValueError: the loss is a banana" in here


@pytest.mark.nightly  # by day, nothing of a launcher is left that is killed (test_supervisor.py): the same guard
def test_no_worker_outlives_the_kernel(kernel):
    kernel.run("trainer.fit(rows, classes, config)")
    workers = kernel.workers()
    assert len(workers) == 2
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(runs, workers)))


@pytest.mark.nightly
def test_the_plot_of_the_page_is_one_below_its_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    page = (PACKAGE / "docs" / "notebooks.md").read_text()
    first, _, plots = (block.split("```")[0] for block in page.split("```python\n")[1:4])
    plots = f"import matplotlib.pyplot as plt\nfrom IPython.display import display\n{plots}"
    fit = "trainer.fit(x_train, y_train, epochs=2, effective_batch_size=64, num_processes=2, callbacks=[LivePlot()]);"
    cells = [nbformat.v4.new_code_cell(each) for each in (first, plots, f"{fit}\n{fit}")]
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=300).execute(cwd=str(tmp_path))
    shown = [each.get("data", {}) for each in cells[2].outputs]
    assert sum("image/png" in each for each in shown) == 2  # one for each fit
    texts = [each["text/plain"] for each in shown if "samples/s" in each.get("text/plain", "")]
    assert ["as above" in each for each in texts] == [False, True]


@pytest.mark.nightly
@pytest.mark.timeout(600)  # on a busy machine, threads that share a step wait for each other
def test_the_quickstart_runs_and_has_its_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.chdir(tmp_path)
    notebook: Any = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    saved = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    found = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    # Lines of one stream may arrive together.
    saved_kinds = [[kind for kind, _ in itertools.groupby(each.output_type for each in outputs)] for outputs in saved]
    found_kinds = [[kind for kind, _ in itertools.groupby(each.output_type for each in outputs)] for outputs in found]
    assert saved_kinds == found_kinds
    assert re.search(r"test accuracy: 0\.9[6-9]", str(found))
    assert re.search(r"test accuracy: 0\.9[6-9]", str(saved))
