"""should_use_fused_mla_rope: off silently, one warning where it cannot run, else on."""

from __future__ import annotations

import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch

from megatron_mla import selection, should_use_fused_mla_rope
from tests.helpers.layers import small_config

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh():
    selection.forget_said()
    selection.missing_reason.cache_clear()
    yield
    selection.forget_said()
    selection.missing_reason.cache_clear()


def asked(**fields) -> tuple[bool, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answer = should_use_fused_mla_rope(SimpleNamespace(**fields))
    return answer, [str(w.message) for w in said]


def test_off_is_silent() -> None:
    assert asked(apply_rope_fusion=False, rotary_percent=0.5) == (False, [])


def test_partial_rotation_falls_back_with_one_warning_per_process() -> None:
    config = {"apply_rope_fusion": True, "rope_type": "rope", "rotary_percent": 0.5}
    answer, said = asked(**config)
    assert answer is False
    assert len(said) == 1 and "rotary_percent = 0.5" in said[0] and "unfused path" in said[0]
    assert asked(**config) == (False, [])
    assert asked(**{**config, "rotary_percent": 0.25}) == (False, [])


def test_reason_is_said_once_where_no_kernel_can_run(monkeypatch) -> None:
    monkeypatch.setattr(selection, "kernels_missing_reason", lambda dtype: "no Triton here")
    answer, said = asked(apply_rope_fusion=True, rotary_percent=1.0)
    assert answer is False
    assert len(said) == 1 and "no Triton here" in said[0]
    assert asked(apply_rope_fusion=True, rotary_percent=1.0) == (False, [])


def test_on_where_kernels_can_run(monkeypatch) -> None:
    monkeypatch.setattr(selection, "kernels_missing_reason", lambda dtype: None)
    for rope_type in ("rope", "yarn"):
        fields = {"apply_rope_fusion": True, "rope_type": rope_type, "rotary_percent": 1.0}
        assert asked(**fields) == (True, [])


def test_old_triton_is_refused_with_its_version(monkeypatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "3.5.1" in selection.kernels_missing_reason(torch.float32)


def test_kernel_that_is_wrong_on_this_machine_is_not_used(monkeypatch) -> None:
    pytest.importorskip("triton")
    from megatron_mla.kernels import selfcheck

    assert selfcheck.rope_fault.__wrapped__(DEVICE, torch.float32) is None

    def wrong(t, *arguments, **how):
        return selfcheck.rope_ref(t, *arguments, **how) * 1.0001

    selfcheck.rope_fault.cache_clear()
    monkeypatch.setattr(selfcheck, "rope", wrong)
    answer, said = asked(apply_rope_fusion=True, rotary_percent=1.0)
    selfcheck.rope_fault.cache_clear()
    assert answer is False
    assert len(said) == 1 and "wrong query, gradient of q" in said[0]


def test_kernels_are_checked_where_a_layer_is_built_on_the_meta_device() -> None:
    pytest.importorskip("triton")
    from megatron_mla.kernels import selfcheck

    with torch.device("meta"):
        assert selfcheck.rope_fault.__wrapped__(DEVICE, torch.bfloat16) is None


def test_kernel_that_cannot_run_here_is_not_used(monkeypatch) -> None:
    pytest.importorskip("triton")
    from megatron_mla.kernels import selfcheck

    def broken(*arguments, **how):
        raise RuntimeError("no binary for this GPU")

    monkeypatch.setattr(selfcheck, "rope_kv_split", broken)
    fault = selfcheck.rope_fault.__wrapped__(DEVICE, torch.float32)
    assert "no binary for this GPU" in fault


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError, SyntaxError])
def test_half_broken_package_counts_as_absent_with_its_reason(monkeypatch, error) -> None:
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "broken_package":
                raise error("half installed")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    reason = selection.missing_reason("broken_package")
    assert error.__name__ in reason and "half installed" in reason
    monkeypatch.setitem(sys.modules, "whole_package", types.ModuleType("whole_package"))
    assert selection.missing_reason("whole_package") is None


def test_cudnn_is_refused_with_a_sentence_on_the_cpu() -> None:
    assert "CUDA device" in selection.cudnn_attention_reason(torch.empty(1, 192), 128)


def test_te_is_absent_with_a_reason_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in selection.te_missing_reason()


def test_decode_kernel_is_for_gpus_and_says_once_why_it_cannot_run(monkeypatch) -> None:
    def asked(dtype=torch.bfloat16, is_cuda=True, requires_grad=False):
        what = {"dtype": dtype, "is_cuda": is_cuda, "requires_grad": requires_grad}
        query = SimpleNamespace(shape=(2, 1, 6, 28), **what)
        keys = SimpleNamespace(shape=(2, 9, 28), **what)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            answer = selection.should_use_decode_kernel(query, keys, 20)
        return answer, [str(w.message) for w in said]

    found = []
    monkeypatch.setattr(selection, "_fault", lambda *what: found.append(what))
    assert asked() == (True, [])
    assert found == [
        ("megatron_mla.kernels.decode_selfcheck", "decode_fault", (torch.bfloat16,) * 2, 6, (20, 8))
    ]
    assert asked(is_cuda=False) == asked(dtype=torch.float64) == (False, [])
    assert asked(requires_grad=True) == (False, [])
    with torch.no_grad():
        assert asked(requires_grad=True) == (True, [])
    monkeypatch.setattr(selection, "_fault", lambda *what: "no FP8 on this GPU")
    answer, said = asked()
    assert answer is False and len(said) == 1
    assert "plain PyTorch for attention over a cache: no FP8 on this GPU." in said[0]
    assert asked() == (False, [])


@pytest.mark.parametrize("how", ["off", "warn", "strict"])
def test_deterministic_mode_on_a_gpu_needs_torchs_flag(how) -> None:
    config = small_config(deterministic_mode=True)
    torch.use_deterministic_algorithms(how != "off", warn_only=how == "warn")
    try:
        assert selection.determinism_is_asked(config, on_gpu=False) is (how == "strict")
        assert selection.determinism_is_asked(small_config(), on_gpu=True) is (how == "strict")
        if how == "strict":
            assert selection.determinism_is_asked(config, on_gpu=True)
        else:
            with pytest.raises(ValueError, match="use_deterministic_algorithms"):
                selection.determinism_is_asked(config, on_gpu=True)
    finally:
        torch.use_deterministic_algorithms(False)
