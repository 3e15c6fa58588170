"""Every file in configs/ is a whole run: it loads, says what each key is for, and could start."""

import re
from pathlib import Path

import pytest

from megatron_mla.recipe import flags
from megatron_mla.recipe.model import check_run, make_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def test_there_are_configs():
    assert {"mla_debug_cpu.yaml", "dsv3_expanded_proxy_h200.yaml"} <= {p.name for p in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_could_start(path):
    run = flags.parse_run(["--config", str(path)])
    on_gpu = "h200" in path.name
    ranks = run.parallel.tensor_model_parallel_size * run.parallel.context_parallel_size
    check_run(run, ranks, on_gpu=on_gpu)
    config = make_config(run, on_gpu=on_gpu)
    assert config.multi_latent_attention and config.calculate_per_token_loss
    assert config.apply_rope_fusion


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_has_a_comment(path):
    for line in path.read_text().splitlines():
        if re.match(r"  \w+:", line):
            assert re.search(r"  # \w", line), line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_commands_in_the_header_name_this_file(path):
    header = path.read_text().split("\n\n")[0]
    named = re.findall(r"--config (\S+)", header)
    assert named and set(named) == {f"configs/{path.name}"}
    run = flags.parse_run(["--config", str(path)])
    assert path.stem in run.logging.log_dir


def test_deepseek_proxies_have_the_published_widths():
    """Of the table in DeepSeek-V2's and V3's papers; 1.873854 is YaRN's factor on the scale."""
    by_name = {path.stem: flags.parse_run(["--config", str(path)]).model for path in CONFIGS}
    v3, lite = by_name["dsv3_expanded_proxy_h200"], by_name["dsv2lite_proxy_h200"]
    own = ("hidden_size", "num_attention_heads", "q_lora_rank")
    assert [v3[key] for key in own] == [7168, 128, 1536]
    assert [lite[key] for key in own] == [2048, 16, None]
    for model in (v3, lite):
        widths = [model[k] for k in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")]
        assert widths == [128, 64, 128] and model["kv_lora_rank"] == 512
        assert model["rotary_scaling_factor"] == 40 and model["mscale"] == model["mscale_all_dim"]


def test_kimi_proxy_has_the_published_widths():
    """Of config.json of Kimi-Linear-48B-A3B."""
    (path,) = (p for p in CONFIGS if p.stem == "kimi_linear_proxy_h200")
    run = flags.parse_run(["--config", str(path)])
    model = run.model
    widths = ["hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "kv_lora_rank"]
    assert [model[key] for key in widths] == [2304, 9216, 1024, 512]
    assert model["q_lora_rank"] is None and model["moe_router_topk_scaling_factor"] == 2.446
    heads = ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"]
    assert [model[key] for key in heads] == [32] * 3
    heads = ["linear_key_head_dim", "linear_value_head_dim", "qk_head_dim", "v_head_dim"]
    assert [model[key] for key in heads] == [128] * 4
    config = make_config(run, on_gpu=True)
    assert not any(config.layer_has_rope(n) for n in range(1, 5))
    assert [config.layer_has_mla(n) for n in range(1, 5)] == [False, False, False, True]
