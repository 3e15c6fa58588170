"""Text through the script that users start, from a checkpoint of a training run.

The weights are large and hardly trained: text is varied, and a wrong key in any layer turns it.
Under torchrun these tests are skipped: they start their own ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.functional import cached
from tests.helpers.generation import assert_greedy
from tests.helpers.launch import ROOT, run_ranks, under_torchrun

SCRIPT = ROOT / "scripts" / "generate.py"
CPU_ONLY = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TRITON_INTERPRET": "0",
}
# Sparse attention; layers share indices.
CONFIG = ("--config", str(ROOT / "configs" / "glm5_dsa_debug.yaml"))
SMALL = (
    *("--hidden-size", "64", "--ffn-hidden-size", "128", "--init-method-std", "0.3"),
    *("--seq-length", "64", "--dsa-indexer-topk", "8"),
)
PROMPTS = ("The import statement", "A", "def f(x):")
COUNT = 24

pytestmark = [
    pytest.mark.functional,
    pytest.mark.skipif(under_torchrun(), reason="starts its own ranks"),
]


def alone(script: str, *arguments: str, stdin: str | None = None) -> str:
    """Standard output of a script on one rank."""
    command = [sys.executable, str(ROOT / "scripts" / script), *CONFIG, *SMALL, *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **CPU_ONLY},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    alone(
        *("pretrain.py", "--tensor-model-parallel-size", "1", "--context-parallel-size", "1"),
        *("--train-iters", "2", "--lr", "1e-4", "--min-lr", "1e-5", "--lr-warmup-iters", "1"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--eval-iters", "1"),
        *("--no-tensorboard", "--no-progress", "--log-dir", str(folder)),
        *("--save", str(folder / "checkpoints")),
    )
    return folder / "checkpoints"


def flags(saved: Path, *extra: str) -> list[str]:
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    how = ["--temperature", "0", "--max-new-tokens", str(COUNT), "--json", "--load", str(saved)]
    return [*how, *asked, *extra]


def lines(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def one_rank(saved) -> list[dict]:
    output = alone("generate.py", *flags(saved))
    found = lines(output)
    assert len(output.splitlines()) == len(found), "something else on standard output"
    return found


def test_text_is_that_of_whole_forward_passes(saved, one_rank, single_rank) -> None:
    from megatron_mla.recipe import checkpoint
    from megatron_mla.recipe.flags import parse_run
    from megatron_mla.recipe.model import make_config, make_gpt
    from megatron_mla.recipe.schema import Parallel

    if torch.cuda.is_available():
        pytest.skip("the text was written on a CPU")
    run = dataclasses.replace(parse_run([*CONFIG, *SMALL]), parallel=Parallel())
    model = make_gpt(make_config(run, on_gpu=False), run, on_gpu=False).eval()
    layout = checkpoint.Layout(
        world_size=1,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        device="cpu",
    )
    checkpoint.load(checkpoint.whole_checkpoints(saved)[-1], model, None, layout)
    assert [line["prompt"] for line in one_rank] == list(PROMPTS)
    for line in one_rank:
        assert len(line["tokens"]) == COUNT
        assert len(set(line["tokens"])) > 5, "text that hardly shows a wrong cache"
        assert bytes(line["tokens"]).decode("utf-8", "replace") == line["text"]
        assert_greedy(model, [list(line["prompt"].encode())], [line["tokens"]])


@pytest.mark.parametrize("shared", [1, 2], ids=["own-caches", "shared-cache"])
def test_two_ranks_write_the_same(saved, one_rank, shared) -> None:
    how = ("--decode-context-parallel-size", str(shared), "--prefill-chunk", "7")
    arguments = [*CONFIG, *SMALL, *flags(saved, *how)]
    output = run_ranks(SCRIPT, 2, *arguments, env=CPU_ONLY)
    assert lines(output) == one_rank


def test_one_prompt_is_streamed_from_standard_input(saved, one_rank) -> None:
    how = ("--temperature", "0", "--max-new-tokens", str(COUNT), "--load", str(saved))
    output = alone("generate.py", *how, stdin=PROMPTS[1])
    assert output == one_rank[1]["prompt"] + one_rank[1]["text"] + "\n"


def test_layers_on_ranks_that_share_rows_answer_like_whole_ones() -> None:
    """All forms of the layer, on tp 4 with caches of their own and shared by 2 and by 4 ranks."""
    output = run_ranks(Path(cached.__file__), cached.RANKS, env=CPU_ONLY, timeout=280)
    report = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert len(report) == len(cached.FORMS) * len(cached.SHARED) * 2
    assert not {name: error for name, error in report.items() if not error <= 1e-5}
