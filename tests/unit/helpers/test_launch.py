"""run_ranks starts ranks, and says what happened when one of them does not end well."""

import os
import signal
import time

import pytest

from tests.helpers.launch import run_ranks

pytestmark = pytest.mark.functional


@pytest.fixture
def program(tmp_path):
    def write(body: str):
        path = tmp_path / "program.py"
        path.write_text(f"import os, sys\nrank = int(os.environ['RANK'])\n{body}\n")
        return path

    return write


def test_ranks_get_their_own_numbers_and_the_repository(program, monkeypatch):
    # As in a test that is itself a rank of `torchrun -m pytest`.
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "1")
    path = program(
        "import tests.helpers\n"
        "names = ('WORLD_SIZE', 'OMP_NUM_THREADS', 'EXTRA')\n"
        "words = [f'rank {rank}', *(os.environ[n] for n in names), *sys.argv[1:]]\n"
        # One write, because both ranks write to the same pipe.
        "sys.stdout.write(' '.join(words) + '\\n')"
    )
    output = run_ranks(path, 2, "--flag", env={"EXTRA": "x"}, timeout=120)
    assert "rank 0 2 1 x --flag" in output
    assert "rank 1 2 1 x --flag" in output


def test_failed_rank_fails_with_its_last_lines(program):
    path = program("print('before'); sys.exit('the reason') if rank == 1 else None")
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*the reason"):
        run_ranks(path, 2, timeout=120)


def test_ranks_that_hang_are_ended(program, tmp_path):
    path = program(
        f"open(r'{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
        "print('waiting', flush=True)\n"
        "import time; time.sleep(600)"
    )
    with pytest.raises(AssertionError, match=r"(?s)no end after 12 s.*waiting"):
        run_ranks(path, 1, timeout=12)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True
