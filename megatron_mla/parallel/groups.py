"""Process groups of one attention layer, read once from Megatron-Core's collection."""

from __future__ import annotations

from dataclasses import dataclass

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
