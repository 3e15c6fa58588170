"""Make the golden cases of transformers' kimi_linear: python tests/golden/make_kimi.py FOLDER"""

import sys
from pathlib import Path

# Its kernels, where installed, would stand in for the library's own torch code.
sys.modules["fla"] = None

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear as m  # noqa: E402

OUT = Path(sys.argv[1])
COMMON = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_key_value_heads=3,
    q_lora_rank=None,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    linear_head_dim=16,
    linear_num_heads=3,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-5,
    intermediate_size=64,
    vocab_size=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
OF_EXPERTS = ("moe", "num_", "n_", "routed")
KEEP = [k for k in COMMON if not k.endswith("token_id") and k != "attn_implementation"]


def randomise(module, generator, decay=1.0):
    for name, p in sorted(module.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("A_log"):
                # Long sums of strong decays cost the library's chunk form digits.
                most = 2 if decay == 1 else 15
                p.copy_((1 + most * torch.rand(p.shape, generator=generator)).log())
            elif name.endswith("dt_bias"):
                weak = torch.rand(p.shape, generator=generator) * 4.6 - 4.6 if decay == 1 else None
                p.copy_(noise + decay if weak is None else weak)
            elif "norm" in name:
                p.copy_(1 + 0.3 * noise)
            elif "conv1d" in name:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * p.shape[-1] ** -0.5)


def save(name, case):
    case = {"name": name, **case}
    torch.save(case, OUT / f"{name}.pt")
    print(name, (OUT / f"{name}.pt").stat().st_size)


def meta(cls, dtype, seed):
    return {
        "library": "transformers",
        "version": transformers.__version__,
        "torch": str(torch.__version__),
        "class": cls,
        "dtype": dtype,
        "seed": seed,
        "device": "cpu",
    }


def run(module, x, grad, **kwargs):
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(x, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    return out.detach(), x.grad, {n: p.grad.clone() for n, p in module.named_parameters()}


def layer(name, cls, seed, rows, batch, dtype=torch.float32, decay=1.0):
    g = torch.Generator().manual_seed(seed)
    full = cls == "KimiLinearAttention"
    config = KimiLinearConfig(
        **COMMON,
        num_hidden_layers=1,
        layer_types=["full_attention" if full else "linear_attention"],
    )
    module = getattr(m, cls)(config, 0)
    randomise(module, g, decay)
    if dtype == torch.bfloat16:
        module.to(torch.bfloat16).to(torch.float32)
    x, grad = (torch.randn(batch, rows, 48, generator=g).to(dtype) for _ in range(2))
    kwargs = {"attention_mask": None}
    if full:
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        kwargs = {"attention_mask": mask.to(dtype)}
    config._attn_implementation = "eager"
    case = {}
    if dtype == torch.bfloat16:
        ref = run(module, x.float(), grad.float(), **kwargs)
        case |= {"ref_output": ref[0], "ref_grad_input": ref[1]}
        module.to(dtype)
        # As the library keeps it; its values fit bf16.
        dt = module.forget_gate.dt_bias
        module.forget_gate.dt_bias = torch.nn.Parameter(dt.detach().float())
    out, grad_input, grads = run(module, x, grad, **kwargs)
    assert torch.isfinite(out).all() and all(torch.isfinite(t).all() for t in grads.values())
    conventions = {
        "num_layers": 1,
        "qk_norm_eps": 1e-6,
        "softmax_scale": module.scaling if full else None,
        "rope_layout": "pair",
    }
    save(
        name,
        {
            "meta": meta(cls, str(dtype).split(".")[1], seed),
            "kind": "dense" if full else "kda",
            "config": {"model_type": "kimi_linear", **{k: COMMON[k] for k in KEEP}},
            "conventions": conventions,
            "state_dict": {n: t.detach().clone() for n, t in module.state_dict().items()},
            "hidden_states": x,
            "output": out,
            "grad_output": grad,
            "grad_input": grad_input,
            "grad_params": grads,
            **case,
        },
    )


def stack(name, seed, rows, batch):
    g = torch.Generator().manual_seed(seed)
    small = dict(
        COMMON,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=2,
        intermediate_size=40,
        moe_intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=2.446,
    )
    pattern = dict(
        num_hidden_layers=4,
        first_k_dense_replace=1,
        linear_attn_config={
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 8,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
    )
    config = KimiLinearConfig(**small, **pattern)
    assert config.layer_types == ["linear_attention", "full_attention"] * 2
    model = KimiLinearForCausalLM(config)
    randomise(model, g)
    for n, b in model.named_buffers():
        if "e_score" in n:
            b.copy_(0.1 * torch.randn(b.shape, generator=g))
    x = torch.randn(batch, rows, 32, generator=g).requires_grad_()
    grad = torch.randn(batch, rows, 32, generator=g)  # vocab 32
    out = model(inputs_embeds=x, use_cache=False).logits
    out.backward(grad)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    state = {
        n: t.detach().clone() for n, t in model.state_dict().items() if "embed_tokens" not in n
    }
    save(
        name,
        {
            "meta": meta("KimiLinearForCausalLM", "float32", seed),
            "kind": "kimi_model",
            "config": {
                "model_type": "kimi_linear",
                **{k: v for k, v in small.items() if k in KEEP or k.startswith(OF_EXPERTS)},
                **pattern,
            },
            "conventions": {
                "num_layers": 4,
                "qk_norm_eps": 1e-6,
                "softmax_scale": 12**-0.5,
                "rope_layout": "pair",
            },
            "state_dict": state,
            "hidden_states": x.detach(),
            "output": out.detach(),
            "grad_output": grad,
            "grad_input": x.grad,
            "grad_params": grads,
        },
    )


torch.set_num_threads(1)
layer("hf_kimi_linear_kda_fp32", "KimiLinearDeltaAttention", 1, 70, 1)
layer("hf_kimi_linear_kda_strong_decay_fp32", "KimiLinearDeltaAttention", 2, 12, 2, decay=0.5)
layer("hf_kimi_linear_kda_bf16", "KimiLinearDeltaAttention", 3, 70, 1, torch.bfloat16)
layer("hf_kimi_linear_nope_fp32", "KimiLinearAttention", 4, 24, 2)
stack("hf_kimi_linear_model_fp32", 5, 24, 2)
