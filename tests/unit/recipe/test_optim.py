"""The CPU optimiser is torch's AdamW over what DDP has reduced, with Megatron's rules around it."""

import pytest
import torch

from megatron_mla.recipe import schema
from megatron_mla.recipe.optim import CpuAdamW, gradient_norm, make_scheduler


def run_of(**optimizer):
    return schema.build_run(
        {
            "model": {"num_layers": 1, "hidden_size": 8},
            "optimizer": {"lr": 0.01, "min_lr": 0.001, "lr_warmup_iters": 4, **optimizer},
            "training": {"train_iters": 20, "global_batch_size": 8},
        }
    )


class Toy(torch.nn.Module):
    """What DDP leaves: parameters with ``main_grad``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.matrix = torch.nn.Parameter(torch.randn(4, 3))
        self.norm = torch.nn.Parameter(torch.randn(3))

    def set_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            param.main_grad = torch.randn(param.shape, generator=generator)


pytestmark = [
    pytest.mark.usefixtures("single_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU's optimiser"),
]


def test_norm_is_that_of_all_gradients():
    toy = Toy()
    toy.set_gradients(1)
    expected = torch.cat([p.main_grad.flatten() for p in toy.parameters()]).norm()
    assert gradient_norm(toy) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0], ids=["off", "clips", "does-not-clip"])
def test_steps_equal_adamw_with_clipping_and_no_decay_of_vectors(clip):
    ours, theirs = Toy(), Toy()
    optimizer = CpuAdamW(ours, run_of(clip_grad=clip))
    scheduler = make_scheduler(optimizer, run_of(clip_grad=clip))
    groups = [
        {"params": [theirs.matrix], "weight_decay": 0.1},
        {"params": [theirs.norm], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        ours.set_gradients(step)
        theirs.set_gradients(step)
        for param in theirs.parameters():
            param.grad = param.main_grad
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for group in reference.param_groups:
            group["lr"] = 0.01 * min(step, 4) / 4 if step <= 4 else optimizer.param_groups[0]["lr"]
        done, norm, _ = optimizer.step()
        reference.step()
        scheduler.step(8)
        assert done and norm > 0
        for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in ours.parameters())


def test_schedule_is_a_function_of_the_samples():
    straight = make_scheduler(CpuAdamW(Toy(), run_of()), run_of())
    rates = []
    for _ in range(21):
        rates.append(straight.optimizer.param_groups[0]["lr"])
        straight.step(8)
    assert rates[0] == 0 and rates[4] == max(rates) == 0.01
    assert rates[20] == pytest.approx(0.001)
    resumed = make_scheduler(CpuAdamW(Toy(), run_of()), run_of())
    resumed.step(13 * 8)
    assert resumed.optimizer.param_groups[0]["lr"] == rates[13]
    decays = [group["weight_decay"] for group in resumed.optimizer.param_groups]
    assert decays == [0.1, 0.0]
