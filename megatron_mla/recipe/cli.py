"""The door to a run: quiet the libraries, answer ``--help`` at once, then load what trains."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from .flags import parse_run


def main(arguments: list[str] | None = None) -> int:
    """``scripts/pretrain.py`` and ``megatron-mla-pretrain``; see :func:`.main.main`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    quiet_libraries()
    if {"-h", "--help"} & set(arguments):
        parse_run(["--help"])  # prints and exits; nothing that trains has to be imported for it
    from .main import main as run

    return run(arguments)


def quiet_libraries(stream=None) -> None:
    """Keep what Megatron-Core and torch say about themselves from burying what the run says.

    Args:
        stream: of this package's own lines; None: standard output.
    """
    rank_0 = int(os.environ.get("RANK", "0")) == 0
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    # Of collectives and ShardedTensor, which Megatron-Core 0.19 calls by their older names.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*ShardedTensor.*")
    if not rank_0:
        warnings.simplefilter("ignore")  # one rank is enough for the rest
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # That there is no CUDA, which the run says in its own words.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Our own choices, of the core attention for one, are worth a line each.
    ours = logging.getLogger("megatron_mla")
    ours.setLevel(logging.INFO if rank_0 else logging.ERROR)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler(stream or sys.stdout))
