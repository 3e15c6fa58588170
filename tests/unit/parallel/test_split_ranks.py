"""Groups of a split that is there already are kept."""

from __future__ import annotations

import pytest
from megatron.core import parallel_state

from megatron_mla.parallel.groups import split_ranks


def test_groups_of_the_same_split_are_kept(single_rank_groups) -> None:
    group = parallel_state.get_tensor_model_parallel_group()
    split_ranks(1, 1)
    assert parallel_state.get_tensor_model_parallel_group() is group


def test_groups_of_another_split_are_made_anew(single_rank_groups, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: made.append("ended"))
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **how: made.append(how))
    split_ranks(2, 4, 8)
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    sizes |= {"expert_model_parallel_size": 8, "create_gloo_process_groups": False}
    assert made == ["ended", sizes]


@pytest.mark.parametrize("split", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_every_size_counts(split, single_rank_groups, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: None)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **how: made.append(how))
    split_ranks(*split)
    assert len(made) == 1
