"""Process groups of one attention layer, and Megatron-Core's groups of one split of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """Tensor- and context-parallel groups of this rank.

    Attributes:
        tp, cp: the process groups.
        tp_rank, tp_size, cp_rank, cp_size: this rank's place in them.
    """

    tp: ProcessGroup
    cp: ProcessGroup
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int

    @classmethod
    def from_collection(cls, collection: ProcessGroupCollection | None) -> ParallelGroups:
        """Groups of ``collection``, or of Megatron-Core's global state when it is None.

        Raises:
            ValueError: the collection has no ``tp`` or no ``cp`` group.
        """
        if collection is None:
            collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        for name in ("tp", "cp"):
            if getattr(collection, name, None) is None:
                raise ValueError(
                    f"pg_collection must have a {name!r} process group for MLA, got none; build it "
                    "with ProcessGroupCollection.use_mpu_process_groups()"
                )
        tp, cp = collection.tp, collection.cp
        return cls(tp, cp, tp.rank(), tp.size(), cp.rank(), cp.size())


def split_ranks(tp: int, cp: int, ep: int = 1) -> None:
    """Give Megatron-Core's parallel state the groups of this split; ranks are joined already.

    Groups of the same split that are there are used again: NCCL keeps the memory of every group
    that ever was. Those of another split are forgotten.

    Args:
        tp, cp, ep: tensor-, context- and expert-parallel sizes.
    """
    if parallel_state.model_parallel_is_initialized():
        there = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if there == (tp, cp, ep):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
    )
