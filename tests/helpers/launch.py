"""Start a test file as a program on several ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 60

# What a surrounding torchrun tells its ranks; the ranks started here get their own.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def under_torchrun() -> bool:
    """Whether this process is a rank of torchrun, rather than a test that may start one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(
    program: str | Path,
    nproc: int,
    *args: str,
    timeout: float = 300,
    env: dict[str, str] | None = None,
) -> str:
    """Run ``program`` on ``nproc`` ranks of this machine and return what they printed.

    The program finds the repository on its import path, one thread per rank, and any free port.

    Args:
        args: passed on to the program.
        timeout: seconds until all ranks are ended and the test fails.
        env: additional environment variables.
    Raises:
        AssertionError: a rank failed or time ran out; the message ends with the last lines.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={nproc}", str(program), *args),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = _end(process)
        raise AssertionError(_report(f"no end after {timeout:g} s", command, output)) from None
    except BaseException:
        # Interrupted, e.g. by the time limit of pytest: leave no rank behind.
        _end(process)
        raise
    if process.returncode:
        raise AssertionError(_report(f"exit status {process.returncode}", command, output))
    return output


def _environment(extra: dict[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def _end(process: subprocess.Popen) -> str:
    """End torchrun and through it its ranks, which are no children of ours; return the output."""
    process.terminate()
    try:
        return process.communicate(timeout=45)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
        return "(torchrun had to be killed: its ranks may still run)"


def _report(what: str, command: list[str], output: str) -> str:
    lines = (output or "").splitlines()
    shown = lines[-SHOWN_LINES:]
    head = f"{what}: {' '.join(command)}\n--- last {len(shown)} of {len(lines)} lines ---\n"
    return head + "\n".join(shown)
