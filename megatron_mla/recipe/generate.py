"""The program behind ``scripts/generate.py``: text from a checkpoint, byte by byte."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import quiet_libraries
from .flags import _Parser, parse_run
from .schema import Parallel, Run

if TYPE_CHECKING:
    import torch

_DESCRIPTION = """\
Go on with text, from a checkpoint that pretrain.py has saved.

The run is named as it was trained, by its file and flags; its sizes of parallelism are not read:
all ranks share every layer's heads (tensor parallelism).
  python scripts/generate.py --config configs/mla_debug_cpu.yaml --prompt "The import statement"
  torchrun --standalone --nproc-per-node=2 scripts/generate.py \\
      --config configs/mla_debug_cpu.yaml --prompt "A class" --prompt "An exception" \\
      --temperature 0 --max-new-tokens 64"""

_EPILOG = """\
Without --prompt and --prompt-file the prompt is what comes from standard input:
  echo -n "def f(" | python scripts/generate.py --config configs/mla_debug_cpu.yaml
One prompt is answered as the text comes. Text goes to standard output, all else to standard error.
Every flag of pretrain.py for the model is a flag here too; pretrain.py --help lists them."""

_CACHE_DTYPES = {
    "auto": None,
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
}


def make_parser() -> argparse.ArgumentParser:
    """Parser of what is no flag of a run."""
    parser = _Parser(
        prog="generate.py",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="YAML file of the run")
    add("--load", metavar="PATH", help="checkpoint, or folder of them; left out, the run's --save")
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given many times")
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="the whole file is one prompt, without a line break at its end; many times too",
    )
    group = parser.add_argument_group("text")
    add = group.add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="bytes (default: 128)")
    add("--temperature", type=float, default=1.0, metavar="X", help="0: always the likeliest byte")
    add("--top-k", type=int, default=0, metavar="N", help="only the N likeliest bytes; 0: all")
    add("--top-p", type=float, default=1.0, metavar="X", help="only the likeliest X of probability")
    add("--seed", type=int, default=1234, metavar="N", help="of the draws (default: 1234)")
    add("--json", action="store_true", help="a line of JSON for each prompt")
    group = parser.add_argument_group("cache")
    add = group.add_argument
    add(
        "--cache-dtype",
        choices=tuple(_CACHE_DTYPES),
        default="auto",
        help="of cached latents; auto: that of the activations. fp8 has no scales",
    )
    add("--prefill-chunk", type=int, metavar="N", help="bytes of a prompt in one forward pass")
    add(
        "--decode-context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks that share the rows of one cache (default: 1)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="bytes of prompt and text together; left out, the --seq-length of the training",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Generate as the command line says.

    Returns:
        Exit code: 0, or 2 after a user error, which rank 0 prints without a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    quiet_libraries(sys.stderr)
    joined = _has_ranks()  # those of a program that calls this one are not ours to part from
    try:
        options, rest = make_parser().parse_known_args(arguments)
        run = _parse(options, rest)
        prompts = _read_prompts(options)
        _check(options, run, prompts)
        checkpoint = _find_checkpoint(options, run)
        model = _load(options, run, checkpoint)
    except (ValueError, ImportError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    else:
        _generate(options, model, prompts)
        status = 0
    if _has_ranks() and not joined:
        sys.modules["torch"].distributed.destroy_process_group()
    return status


def _parse(options: argparse.Namespace, rest: list[str]) -> Run:
    """The run, on as many tensor-parallel ranks as there are."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    run = parse_run(["--config", options.config, *rest])
    asked = run.parallel.tensor_model_parallel_size
    flag = "--tensor-model-parallel-size"
    if any(word.partition("=")[0] == flag for word in rest) and asked != world_size:
        raise ValueError(
            f"{flag} must be the number of ranks, {world_size}, got {asked}; leave it out, and "
            f"start torchrun --nproc-per-node={asked} for as many"
        )
    return dataclasses.replace(run, parallel=Parallel(tensor_model_parallel_size=world_size))


def _read_prompts(options: argparse.Namespace) -> list[bytes]:
    prompts = [text.encode("utf-8", "surrogateescape") for text in options.prompt]
    for name in options.prompt_file:
        try:
            prompts.append(Path(name).read_bytes().removesuffix(b"\n"))
        except OSError as error:
            raise ValueError(f"--prompt-file {name} cannot be read: {error.strerror}") from None
    if prompts:
        return prompts
    if "RANK" in os.environ:
        raise ValueError(
            "a prompt must be given by --prompt or --prompt-file under torchrun, whose ranks "
            "cannot all read standard input"
        )
    if sys.stdin.isatty():
        raise ValueError("a prompt must be given by --prompt, --prompt-file or standard input")
    return [sys.stdin.buffer.read()]


def _check(options: argparse.Namespace, run: Run, prompts: list[bytes]) -> None:
    """Refuse what could not run, before anything is started."""
    from megatron_mla.inference.sampling import Sampler

    from .text import BYTE_VOCABULARY

    ranks = run.parallel.tensor_model_parallel_size
    data, shared = run.data, options.decode_context_parallel_size
    Sampler(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    for flag in ("max_new_tokens", "prefill_chunk", "max_length"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    if shared < 1 or ranks % shared:
        raise ValueError(
            f"--decode-context-parallel-size must divide the number of ranks, {ranks}, got {shared}"
        )
    if not all(prompts):
        raise ValueError(
            "a prompt must have at least one byte, got an empty one; a line break begins a text"
        )
    if data.data_path is not None and Path(data.data_path + ".idx").is_file():
        raise ValueError(
            f"data.data_path must be text, got the indexed dataset {data.data_path}, whose tokens "
            "are no bytes; use megatron_mla.inference.generation.generate with its tokenizer"
        )
    if data.vocab_size < BYTE_VOCABULARY:
        raise ValueError(
            f"data.vocab_size must be at least {BYTE_VOCABULARY}, for text is read as bytes, got "
            f"{data.vocab_size}; use megatron_mla.inference.generation.generate with a tokenizer"
        )
    if data.vocab_size % ranks:
        raise ValueError(
            f"data.vocab_size must be a multiple of the number of ranks, {ranks}, got "
            f"{data.vocab_size}; start another number of ranks"
        )
    if (stages := run.model.get("pipeline_model_parallel_size", 1)) != 1:
        raise ValueError(f"pipeline_model_parallel_size must be 1 to generate, got {stages}")
    longest = max(len(prompt) for prompt in prompts)
    limit = options.max_length or data.seq_length
    if longest + options.max_new_tokens > limit:
        raise ValueError(
            f"prompt and text must fit into {limit} bytes, got {longest} and --max-new-tokens "
            f"{options.max_new_tokens}; lower it, or pass --max-length to go beyond what the model "
            "was trained on"
        )


def _find_checkpoint(options: argparse.Namespace, run: Run) -> Path:
    from .checkpoint import whole_checkpoints

    folder = options.load or run.checkpoint.save
    if folder is None:
        raise ValueError("--load must name a checkpoint, as the run has no checkpoint.save")
    path = Path(folder)
    found = [path] if (path / "run.json").is_file() else whole_checkpoints(path)
    if not found:
        name = "--load" if options.load else "checkpoint.save"
        raise ValueError(
            f"{name} {path} holds no whole checkpoint (a folder iter_*/ with run.json); train one "
            f"with scripts/pretrain.py --config {options.config}, or give its folder by --load"
        )
    return found[-1]


def _load(options: argparse.Namespace, run: Run, path: Path) -> torch.nn.Module:
    """The model with the checkpoint's weights, on all ranks."""
    import torch

    from megatron_mla.cpu_shim import install_cpu_shim

    from . import checkpoint
    from .loop import bare
    from .main import _check_gpus, _make_deterministic, _start_ranks
    from .model import count_parameters, make_config, make_gpt

    on_gpu = not install_cpu_shim()
    if on_gpu:
        _check_gpus(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    config = make_config(run, on_gpu=on_gpu)
    if config.deterministic_mode:
        _make_deterministic()
    device = _start_ranks(run, on_gpu)
    model = make_gpt(config, run, on_gpu=on_gpu)
    ranks = run.parallel.tensor_model_parallel_size
    layout = checkpoint.Layout(
        world_size=ranks,
        tensor_model_parallel_size=ranks,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        device=device.type,
    )
    checkpoint.load(path, bare(model), None, layout)
    _note(
        f"{path}: {count_parameters(model) / 1e6:.2f} M parameters on {ranks} {device.type} rank(s)"
    )
    return model.eval()


def _generate(options: argparse.Namespace, model: torch.nn.Module, prompts: list[bytes]) -> None:
    import torch

    from megatron_mla.inference.context import LatentInferenceContext
    from megatron_mla.inference.generation import generate
    from megatron_mla.inference.sampling import Sampler

    from .text import BYTE_VOCABULARY

    dtype = _CACHE_DTYPES[options.cache_dtype]
    context = LatentInferenceContext(
        len(prompts),
        max(len(prompt) for prompt in prompts) + options.max_new_tokens,
        cache_dtype=None if dtype is None else getattr(torch, dtype),
        dcp=_dcp(options.decode_context_parallel_size),
    )
    sampler = Sampler(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        num_tokens=BYTE_VOCABULARY,
    )
    first = torch.distributed.get_rank() == 0
    stream = _Stream(prompts[0]) if first and len(prompts) == 1 and not options.json else None
    texts: list[list[int]] = [[] for _ in prompts]
    times = [time.perf_counter()]
    passes = generate(
        model,
        [list(prompt) for prompt in prompts],
        max_new_tokens=options.max_new_tokens,
        choose=sampler,
        context=context,
        prefill_chunk=options.prefill_chunk,
    )
    for tokens in passes:
        if len(times) == 1:
            times.append(time.perf_counter())
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        if stream is not None:
            stream.add(bytes(tokens))
    times.append(time.perf_counter())
    if stream is not None:
        stream.end()
    elif first:
        _print_all(options, prompts, [bytes(text) for text in texts])
    prefilled, decoded = sum(map(len, prompts)), len(prompts) * (options.max_new_tokens - 1)
    speeds = [
        f"{name} {count} tokens in {end - start:.2f} s ({count / max(end - start, 1e-9):.0f}/s)"
        for name, count, start, end in (
            ("prefill", prefilled, *times[:2]),
            ("decode", decoded, *times[1:]),
        )
    ]
    _note(", ".join(speeds))


def _dcp(size: int):
    """Neighbouring tensor-parallel ranks that share a cache; None for one alone."""
    if size == 1:
        return None
    import torch

    from megatron_mla.inference.dcp import DecodeContextParallel

    group, _ = torch.distributed.new_subgroups(size)
    return DecodeContextParallel(group)


class _Stream:
    """Text on standard output as its bytes come."""

    def __init__(self, prompt: bytes) -> None:
        # Bytes of one character may come one by one, and a model may write what is no UTF-8.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt)

    def add(self, text: bytes, final: bool = False) -> None:
        print(self._decoder.decode(text, final), end="\n" if final else "", flush=True)

    def end(self) -> None:
        self.add(b"", final=True)


def _print_all(options: argparse.Namespace, prompts: list[bytes], texts: list[bytes]) -> None:
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        if options.json:
            start, end = (part.decode("utf-8", "replace") for part in (prompt, text))
            # The bytes too: a model may write what is no UTF-8.
            line = {"prompt": start, "text": end, "tokens": list(text)}
            print(json.dumps(line), flush=True)
        else:
            print(f"--- prompt {number}", (prompt + text).decode("utf-8", "replace"), sep="\n")


def _note(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, file=sys.stderr, flush=True)


def _has_ranks() -> bool:
    """Whether torch's process group is there; does not import torch for the answer."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed is not None and distributed.is_initialized()
