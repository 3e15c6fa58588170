"""What generate.py reads, prints and refuses before any rank starts."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_mla.recipe import generate

CONFIG = str(Path(__file__).parents[3] / "configs" / "mla_debug_cpu.yaml")
MOE = str(Path(__file__).parents[3] / "configs" / "mla_moe_debug_cpu.yaml")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_main(capsys, *arguments: str) -> str:
    """What it says of a user's error."""
    assert generate.main(["--config", CONFIG, *arguments]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.yaml"], "none.yaml: no such file"),
        (["--no-such"], "unknown flag '--no-such'"),
        ([], r"checkpoint.save runs/\S+ holds no whole checkpoint .*pretrain.py --config"),
        (["--load", "."], r"--load \. holds no whole checkpoint"),
        (["--prompt", ""], "a prompt must have at least one byte"),
        (["--prompt-file", "none.txt"], "--prompt-file none.txt cannot be read: No such file"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--max-new-tokens", "255"], "fit into 256 bytes, got 2 and --max-new-tokens 255; .*-len"),
        (["--max-length", "9", "--max-new-tokens", "8"], "must fit into 9 bytes"),
        (["--prefill-chunk", "0"], "--prefill-chunk must be at least 1"),
        (["--temperature", "-1"], "temperature must be a number of at least 0"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1"),
        (["--cache-dtype", "fp4"], "invalid choice: 'fp4'"),
        (["--vocab-size", "128"], "data.vocab_size must be at least 256"),
        (["--data-path", "text"], "data.data_path must be text, got the indexed dataset text"),
        (["--decode-context-parallel-size", "2"], "must divide the number of ranks, 1, got 2"),
        (["--tensor-model-parallel-size", "2"], "must be the number of ranks, 1, got 2"),
        (["--tensor-model-parallel-size=2"], "nproc-per-node=2 for as many"),
        (["--pipeline-model-parallel-size", "2"], "pipeline_model_parallel_size must be 1"),
    ],
)
def test_user_errors_are_one_line(arguments, message, capsys, tmp_path) -> None:
    (tmp_path / "text.idx").touch()
    prompt = [] if any("prompt" in word for word in arguments) else ["--prompt", "ab"]
    assert re.search(message, run_main(capsys, *prompt, *arguments))


def test_under_torchrun_standard_input_is_not_read(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "under torchrun" in run_main(capsys)
    monkeypatch.setenv("RANK", "1")
    assert generate.main(["--config", CONFIG]) == 2
    assert capsys.readouterr().err == ""


def test_a_terminal_is_not_waited_for(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert "must be given by --prompt, --prompt-file or standard input" in run_main(capsys)


def options(*arguments: str):
    return generate.make_parser().parse_known_args(["--config", CONFIG, *arguments])


def test_prompts_of_all_sources(tmp_path, monkeypatch) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"two\nlines\n\xff\n")
    asked, rest = options("--prompt", "ä", "--prompt-file", str(file), "--prompt", "b")
    assert generate._read_prompts(asked) == ["ä".encode(), b"b", b"two\nlines\n\xff"]
    assert rest == []
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"all of\nit\n"))
    )
    assert generate._read_prompts(options()[0]) == [b"all of\nit\n"]


@pytest.mark.parametrize("config", [CONFIG, MOE])
def test_all_ranks_are_tensor_parallel_whatever_the_training_was(config, monkeypatch) -> None:
    """The file says tp 2 and sequence parallelism, one of them cp 2 too."""
    for ranks in (1, 4):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        asked, rest = generate.make_parser().parse_known_args(
            ["--config", config, "--num-layers", "2", "--seed", "7", "--lr", "0.5"]
        )
        run = generate._parse(asked, rest)
        assert run.parallel == generate.Parallel(tensor_model_parallel_size=ranks)
        assert run.model["num_layers"] == 2 and asked.seed == 7


def test_bytes_are_shown_as_whole_characters(capsys) -> None:
    stream = generate._Stream("ö".encode()[:1])
    for byte in ("ö".encode()[1:], b"a", b"\xff", "€".encode()[:2]):
        stream.add(byte)
    stream.end()
    assert capsys.readouterr().out == "öa\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n"


def test_help_teaches_without_loading_what_generates(capsys) -> None:
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    text = capsys.readouterr().out
    for word in ("--prompt ", "--cache-dtype", "torchrun", "pretrain.py --help", "0: always"):
        assert word in text


def test_process_group_of_the_caller_stays(default_group, capsys) -> None:
    assert generate.main(["--config", "nowhere.yaml", "--prompt", "a"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
    assert torch.distributed.is_initialized()
