"""What a run shows in addition to the fit's numbers: the program's git commit, and how busy the machine is."""

from __future__ import annotations

import subprocess

GIT_SECONDS = 2.0


def git_state() -> dict[str, str]:
    """Return the commit of the working directory, and whether tracked files differ; empty if git fails or takes 2 s."""
    # Without locks, at which git commands of the user's would fail, and without a daemon.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "describe"]
    options = ["--always", "--exclude=*", "--abbrev=40", "--dirty"]
    quiet = subprocess.DEVNULL
    try:
        output = subprocess.check_output(command + options, stdin=quiet, stderr=quiet, timeout=GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return {}
    commit, _, dirty = output.decode("ascii", "replace").strip().partition("-")
    return {"git/commit": commit, "git/dirty": str(bool(dirty))}


def system_load() -> dict[str, float]:
    """Return in percent how busy all CPUs were since the last call, and how full memory is."""
    import psutil

    memory = psutil.virtual_memory().percent
    return {"system/cpu_percent": psutil.cpu_percent(), "system/memory_percent": memory}
