"""The command line: one flag for every field of a run, under Megatron-LM's name."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any, Literal, NoReturn

import yaml

from .schema import (
    SECTIONS,
    SET_ELSEWHERE,
    Run,
    build_run,
    check_model_key,
    model_fields,
    read_yaml,
    unknown,
)

_DESCRIPTION = """\
Train a GPT with multi-latent attention on Megatron-Core.

Under torchrun, or alone for one rank:
  torchrun --standalone --nproc-per-node=4 scripts/pretrain.py --config configs/mla_debug_cpu.yaml
  python scripts/pretrain.py --config configs/mla_debug_cpu.yaml \\
      --tensor-model-parallel-size 1 --context-parallel-size 1

The file holds the whole run; every value in it can be overridden here."""

_EPILOG = """\
Every other field of MLATransformerConfig is a flag too, underscores as dashes and the value in
YAML: --moe-router-topk 2, --rope-type yarn, --softmax-scale 0.1, --qk-layernorm, --no-qk-layernorm.
--deterministic-mode gives the same bits on every run on a GPU too; attention takes longer.
Defaults above are those of a value that the file leaves out."""

# Model fields shown by --help: name of the field, flag, text.
_MODEL_HELP = (
    ("num_layers", "--num-layers", "transformer layers"),
    ("hidden_size", "--hidden-size", "width of the residual stream"),
    ("ffn_hidden_size", "--ffn-hidden-size", "inner width of the dense feed-forward layer"),
    ("num_attention_heads", "--num-attention-heads", "heads over all tensor-parallel ranks"),
    ("q_lora_rank", "--q-lora-rank", "width of the query latent; null: none"),
    ("kv_lora_rank", "--kv-lora-rank", "width of the key-value latent"),
    ("qk_head_dim", "--qk-head-dim", "unrotated width of a query and key head"),
    ("qk_pos_emb_head_dim", "--qk-pos-emb-head-dim", "rotated width of a query and key head"),
    ("v_head_dim", "--v-head-dim", "width of a value head"),
    ("mla_rope_numerics", "--mla-rope-numerics", "rounding of the rotation: megatron | fp32"),
    ("mla_core_attention", "--mla-core-attention", "core attention: auto | sdpa | te"),
    ("num_moe_experts", "--num-experts", "experts of a MoE layer; null: dense layers only"),
    ("recompute_granularity", "--recompute-granularity", "selective | full: recompute activations"),
    ("recompute_modules", "--recompute-modules", "what selective recomputes, [mla_up_proj, ...]"),
)

# Megatron-LM's flags that are not the field's name with dashes: flag -> (field, value).
_MODEL_SWITCHES = {
    "--no-rope-fusion": ("apply_rope_fusion", False),
    "--apply-rope-fusion": ("apply_rope_fusion", True),
    "--swiglu": ("gated_linear_unit", True),
    "--disable-bias-linear": ("add_bias_linear", False),
}
_MODEL_ALIASES = {"--num-experts": "num_moe_experts", "--norm-epsilon": "layernorm_epsilon"}
_SECTION_SWITCHES = {"--no-load-optim": ("checkpoint", "load_optim", False)}


def flag_of(field: dataclasses.Field) -> str:
    """Flag of a section's field, Megatron-LM's name for it."""
    return "--" + field.name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """argparse prints its errors and exits, on every rank; a run's errors are one kind."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the flags")


def make_parser() -> argparse.ArgumentParser:
    """Parser whose destinations are ``section.field``; absent flags leave nothing behind."""
    parser = _Parser(
        prog="pretrain.py",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run")
    group = parser.add_argument_group("model", "The transformer and its attention.")
    for name, flag, text in _MODEL_HELP:
        group.add_argument(flag, dest=f"model.{name}", type=_yaml_value, metavar="V", help=text)
    group.add_argument(
        "--no-rope-fusion", action="store_true", help="eager rotary embedding, no fused kernel"
    )
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(section, cls.__doc__)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            _add_field(group, section, field, hints[field.name])
    return parser


def _add_field(group: Any, section: str, field: dataclasses.Field, hint: Any) -> None:
    options: dict[str, Any] = {"dest": f"{section}.{field.name}"}
    default = "off" if field.default is False else "on" if field.default is True else field.default
    options["help"] = field.metadata["help"] + (
        "" if field.default is None else f" (default: {default})"
    )
    plain = [t for t in typing.get_args(hint) if t is not type(None)]
    if typing.get_origin(hint) is Literal:
        options["choices"] = typing.get_args(hint)
    elif hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options["type"] = plain[0] if union else hint
        options["metavar"] = {int: "N", float: "X", str: "PATH"}[options["type"]]
    group.add_argument(flag_of(field), **options)


def _yaml_value(text: str) -> Any:
    return yaml.safe_load(text)


def _flag_names() -> set[str]:
    parser = make_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    flags |= {*_MODEL_SWITCHES, *_MODEL_ALIASES, *_SECTION_SWITCHES}
    return flags | {"--" + name.replace("_", "-") for name in model_fields()}


def _model_override(flag: str, known: dict[str, Any]) -> tuple[str, bool]:
    """Field of MLATransformerConfig that a flag names, and whether it is a ``--no-`` flag."""
    name = _MODEL_ALIASES.get(flag, flag[2:].replace("-", "_"))
    negated = name.startswith("no_") and name[3:] in known
    name = name[3:] if negated else name
    if name in SET_ELSEWHERE:
        check_model_key(name, known)
    if name not in known:
        raise unknown("flag", flag, _flag_names())
    return name, negated


def _parse_rest(rest: list[str], tree: dict[str, dict[str, Any]]) -> None:
    """Read the flags that --help does not list, ``--field V``, ``--field=V`` or ``--no-field``."""
    known: dict[str, Any] | None = None
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ValueError(f"unexpected argument {flag!r}; every value follows a --flag")
        if flag in _SECTION_SWITCHES:
            section, name, setting = _SECTION_SWITCHES[flag]
            tree.setdefault(section, {})[name] = setting
        elif flag in _MODEL_SWITCHES:
            name, setting = _MODEL_SWITCHES[flag]
            tree["model"][name] = setting
        else:
            known = known or model_fields()
            name, negated = _model_override(flag, known)
            if negated:
                tree["model"][name] = False
            elif equals:
                tree["model"][name] = _yaml_value(value)
            elif rest and not rest[0].startswith("--"):
                tree["model"][name] = _yaml_value(rest.pop(0))
            else:
                tree["model"][name] = True


def parse_run(arguments: list[str]) -> Run:
    """Read ``--config`` and the flags over it.

    Raises:
        ValueError: an unknown key or flag (the nearest is named) or a value of the wrong type.
        SystemExit: ``--help``.
    """
    options, rest = make_parser().parse_known_args(arguments)
    chosen = vars(options)
    tree = read_yaml(chosen.pop("config"))
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    if not isinstance(tree.setdefault("model", {}), dict):
        raise ValueError(f"section model must be a mapping of keys, got {tree['model']!r}")
    if chosen.pop("no_rope_fusion", False):
        tree["model"]["apply_rope_fusion"] = False
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    _parse_rest(list(rest), tree)
    return build_run(tree)
