"""Tries everything on a real GPU that needs one: `python -m tests.gpu`, in at most ten minutes.

    python -m tests.gpu                        # one GPU; PyTorch 2.11 or newer, NumPy, pytest and this repository
    python -m tests.gpu --only stops speed     # some of the steps
    python -m tests.gpu --device fakegpu       # what can run without a card, on the stand-in of tests/support/stand_in

Each step is a process with a time limit of its own, so that one that hangs or crashes costs no more than itself. At the
end there is a table on the terminal, and gpu.json, gpu.md and each step's output in a folder (`--out`; by default $OUT,
else ./gpu-report). The exit code is 1 where a step failed. Nothing is fetched from a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "pytest": "pytest",
    "yaml": "pyyaml",
    "omegaconf": "omegaconf",
    "click": "click",
    "rich": "rich",
    "tensorboard": "tensorboard",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "cloudpickle": "cloudpickle",
    "typing_extensions": "typing-extensions",
}
"""What is imported: the package that brings it."""
KEPT_FOR_SPEED = 150.0
"""Seconds at the end that only the last step may use."""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")


@dataclasses.dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: What `--only` takes.
        what: For the table.
        seconds: Its limit.
        arguments: Of Python.
        environment: More variables.
    """

    name: str
    what: str
    seconds: float
    arguments: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def check(name: str, what: str, seconds: float, **environment: str) -> Step:
    """Returns a step that calls a function of checks.py."""
    return Step(name, what, seconds, ("-m", "tests.gpu.checks", name), environment)


def ranks(name: str, what: str, seconds: float, backend: str) -> Step:
    """Returns a step of two ranks that share one GPU: NCCL refuses that unless a variable allows it."""
    launch = ("-m", "cyxtrain", "launch", "-n", "2", "--", sys.executable, "-m", "tests.gpu.checks", name)
    variables = {"DISTRIBUTED_BACKEND": backend, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return Step(name, what, seconds, launch, variables | ({"CUDA_VISIBLE_DEVICES": "0"} if backend == "nccl" else {}))


def steps_for(device: str) -> list[Step]:
    """Returns the steps, in the order in which they run."""
    is_real = device == "cuda"
    backend = "nccl" if is_real else "cpu"
    tests = {name: str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in ("ring_cuda", "cuda", "contract")}
    speed = ("--steps", "20", "--warm", "5", "--rounds", "2", "--precisions", "bf16", "--models")
    tiny = ("--tiny", "--precisions", "float32")
    benchmark = str(ROOT / "benchmarks" / "gpu_vs_loop.py")
    return [
        check("machine", "GPU, PyTorch and NCCL", 40),
        Step("doctor", "python -m cyxtrain doctor", 60, ("-m", "cyxtrain", "doctor")),
        check("reducer", "gradients over NCCL, a world of one", 60, DISTRIBUTED_BACKEND=backend),
        check("stops", "host stops per step", 60),
        check("race", "rows on the GPU have the bits of rows on the CPU", 60),
        check("features", "bfloat16, compiled models, checkpoints, default device", 120),
        ranks("two_ranks", "two ranks on one GPU", 60, backend),
        ranks("failing_rank", "a rank that raises in step 3", 60, backend),
        Step("ring_cuda", "tests/ring/test_ring_cuda.py", 120, (*_PYTEST, "-x", tests["ring_cuda"])),
        Step("cuda", "tests/integration/fit/test_cuda.py", 240, (*_PYTEST, tests["cuda"])),
        Step("collectives", "every collective over NCCL", 60, (*_PYTEST, tests["contract"], "-k", "nccl and 1")),
        Step("speed", "fit against loops", 150, (benchmark, *((*speed, "gpt2", "resnet50") if is_real else tiny))),
    ]


def run(step: Step, seconds: float, out: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Runs one step; returns a row for each result that it printed, or one."""
    began = time.monotonic()
    log = out / f"{step.name}.log"
    arguments = [*step.arguments, *(["--json", str(out / "speed.json")] if step.name == "speed" else [])]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment | step.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - began
    text = log.read_text("utf-8", "replace")
    rows = [json.loads(line) for line in re.findall(r"RESULT (\{.*\})", text)]
    rows = [{"name": step.name, "what": step.what} | row for row in rows] or [judged(step, code, text, out)]
    if code is None:
        rows.append(
            {"name": step.name, "what": step.what, "status": "failed", "note": f"did not end in {seconds:.0f} s"}
        )
    elif code and all(row["status"] != "failed" for row in rows):
        rows.append({"name": step.name, "what": step.what, "status": "failed", "note": f"exit code {code}: {log.name}"})
    rows[0]["seconds"] = round(took, 1)
    return rows


def judged(step: Step, code: int | None, text: str, out: Path) -> dict[str, Any]:
    """Returns the row of a step that prints no results: of pytest, the doctor, or the benchmark."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    row = {
        "name": step.name,
        "what": step.what,
        "status": "failed" if code else "passed",
        "note": lines[-1].strip()[:150],
    }
    if step.name == "doctor" and not code:
        row["note"] = ""
    if step.name == "speed":
        file = out / "speed.json"
        found = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
        against = [each for each in found if each["way"] == "loop"]
        row["ratio"] = {each["model"]: round(each["fit_times_faster"], 3) for each in against}
        row["note"] = "fit against a plain loop, above 1: faster; the table is in speed.log" if against else row["note"]
    elif "pytest" in step.arguments and not code and " passed" not in lines[-1]:
        row["status"] = "skipped"
    return row


def report(rows: list[dict[str, Any]], device: str, out: Path) -> None:
    """Writes the results as JSON and Markdown, and prints the table."""
    lines = ["| step | what | result | seconds | ratio | note |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        ratio = ", ".join(f"{name} {value}" for name, value in (row.get("ratio") or {}).items())
        note = str(row.get("note", "")).replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {row['name']} | {row['what']} | {row['status']} | {row.get('seconds', '')} | {ratio} | {note} |"
        )
    (out / "gpu.json").write_text(json.dumps({"device": device, "rows": rows}, indent=1), encoding="utf-8")
    (out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def environment_for(device: str) -> dict[str, str]:
    """Returns the variables of every step; builds the stand-in where that is the device."""
    path = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(path), "CYXTRAIN_TEST_GPU": device, "PYTHONFAULTHANDLER": "1"}
    if device == "fakegpu":
        sys.path[:0] = path
        from stand_in import fakegpu

        if reason := fakegpu.why_not():
            raise SystemExit(f"the stand-in for a GPU cannot be built: {reason}.")
        variables |= fakegpu.environment(fakegpu.built())
    decided = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in decided} | variables


def main() -> int:
    """Runs what the command line asks for; returns 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "fakegpu"), default="cuda", help="fakegpu: the stand-in")
    parser.add_argument("--dry", action="store_const", const="fakegpu", dest="device", help="--device fakegpu")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in steps_for("cuda")], help="some steps")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-report")), help="folder for results"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for all steps together")
    given = parser.parse_args()
    missing = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed here: {', '.join(missing)}, which cyxtrain needs: pip install {' '.join(missing)}.")
        return 2
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    (out / "speed.json").unlink(missing_ok=True)
    environment = environment_for(given.device)
    rows: list[dict[str, Any]] = []
    chosen = [step for step in steps_for(given.device) if not given.only or step.name in given.only]
    for step in chosen:
        kept = 0.0 if step.name == "speed" or chosen[-1].name != "speed" else KEPT_FOR_SPEED
        longest = step.seconds if given.device == "cuda" else 2 * step.seconds  # the stand-in computes on cores
        seconds = min(longest, deadline - time.monotonic() - kept)
        if seconds < 5:
            rows.append({"name": step.name, "what": step.what, "status": "not run", "note": "the time was over"})
            continue
        print(f"{step.name}: {step.what}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
        rows += run(step, seconds, out, environment)
    report(rows, given.device, out)
    return 1 if any(row["status"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
