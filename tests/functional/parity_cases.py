"""The cases of parity.py: ways to split a layer or a GPT over ranks."""

from __future__ import annotations

import dataclasses

# Multiples of 2 * cp for cp up to 4; unequal, one empty, one of the least length.
LENGTHS = (16, 0, 8, 24)
LENGTHS_CP8 = (32, 0, 16, 48)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to split one layer."""

    tp: int
    cp: int
    packed: bool = False
    sp: bool = False
    down: str = "duplicated"
    q_lora_rank: int | None = 28
    rope_type: str = "yarn"
    recompute: str = ""  # "selective" | "full"
    gpt: bool = False
    experts: bool = False
    fused: bool = True
    form: str = "expanded"  # "absorbed" | "dsa" | "dsa_sparse_loss" | "kda"; a GPT of kda is hybrid
    nope: bool = False  # no layer rotates
    kernels: bool = False  # of sparse attention, in the interpreter; on a GPU they always run

    @property
    def world(self) -> int:
        return self.tp * self.cp

    @property
    def heads(self) -> int:
        """At least three of each rank: no power of two."""
        return max(6, 3 * self.tp)

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS if self.cp <= 4 else LENGTHS_CP8

    @property
    def id(self) -> str:
        parts = ["gpt" if self.gpt else "layer", f"tp{self.tp}", f"cp{self.cp}"]
        parts += ["thd" if self.packed else "sbhd", "sp" if self.sp else "nosp", self.down]
        parts += ["q" if self.q_lora_rank else "noq", self.rope_type]
        parts += [f"recompute_{self.recompute}"] if self.recompute else []
        parts += [] if self.fused else ["eager"]
        parts += [] if self.form == "expanded" else [self.form]
        parts += ["nope"] if self.nope else []
        parts += ["kernels"] if self.kernels else []
        return "-".join(parts + (["experts"] if self.experts else []))


def _cases() -> list[Case]:
    cases = []
    for tp, cp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        for sp in (False, True) if tp > 1 else (False,):
            for packed in (False, True):
                for down in ("duplicated", "column") if tp > 1 else ("duplicated",):
                    cases.append(Case(tp=tp, cp=cp, packed=packed, sp=sp, down=down))
    for tp, cp, sp in ((2, 1, True), (1, 2, False), (2, 2, True)):
        common = {"tp": tp, "cp": cp, "sp": sp, "rope_type": "rope"}
        cases.append(Case(**common, q_lora_rank=None))
        cases.append(Case(**common, packed=True, recompute="selective"))
    for tp, cp, sp, packed in (
        (2, 1, False, False),
        (2, 1, True, True),
        (1, 2, False, True),
        (2, 2, True, False),
        (2, 2, False, True),
        (1, 4, False, False),
    ):
        cases.append(Case(tp=tp, cp=cp, sp=sp, packed=packed, gpt=True))
    for tp, cp, sp, packed in ((2, 1, True, False), (1, 2, False, True), (2, 2, True, True)):
        common = {"tp": tp, "cp": cp, "sp": sp, "packed": packed, "gpt": True}
        cases += [Case(**common, recompute="full"), Case(**common, experts=True)]
    for tp, cp, sp, packed in ((1, 1, False, True), (2, 1, True, False), (2, 2, True, True)):
        cases.append(Case(tp=tp, cp=cp, sp=sp, packed=packed, fused=False))
    cases += _latent_cases() + _kimi_cases() + _wide_cases()
    # Of one split after the other: process groups are made once for each.
    return sorted(cases, key=lambda case: (case.world, case.tp))


def _latent_cases() -> list[Case]:
    """Absorbed and sparse attention, in every split; all that they share is checked above."""
    cases = []
    for tp, cp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        for sp in (False, True) if tp > 1 else (False,):
            for packed in (False, True):
                common = {"tp": tp, "cp": cp, "sp": sp, "packed": packed, "rope_type": "rope"}
                cases.append(Case(**common, form="absorbed"))
                cases.append(Case(**common, form="dsa_sparse_loss" if packed else "dsa"))
    for tp, cp, sp, packed in ((2, 1, True, True), (1, 2, False, False), (2, 2, True, False)):
        common = {"tp": tp, "cp": cp, "sp": sp, "packed": packed}
        cases.append(Case(**common, form="absorbed", down="column" if tp > 1 else "duplicated"))
        cases.append(Case(**common, form="dsa", recompute="selective"))
        cases.append(Case(**common, form="dsa", gpt=True))
        cases.append(Case(**common, form="dsa_sparse_loss", gpt=True, recompute="full"))
    cases.append(Case(tp=2, cp=2, sp=True, packed=True, form="dsa", fused=False))
    for tp, cp, packed in ((2, 1, True), (1, 2, False), (2, 2, True)):
        form = "dsa_sparse_loss" if packed else "dsa"
        cases.append(Case(tp=tp, cp=cp, sp=tp > 1, packed=packed, form=form, kernels=True))
    return cases


def _kimi_cases() -> list[Case]:
    """Layers without rotation in every form and split, and Kimi Delta Attention over tp."""
    cases = []
    for tp, cp, packed in ((2, 1, False), (1, 2, True), (2, 2, False), (2, 2, True)):
        common = {"tp": tp, "cp": cp, "packed": packed, "rope_type": "rope", "nope": True}
        cases.append(Case(**common, sp=tp > 1, q_lora_rank=None))
        cases.append(Case(**common, sp=tp > 1 and packed, form="absorbed"))
        cases.append(Case(**common, sp=tp > 1, form="dsa_sparse_loss" if packed else "dsa"))
    for tp, sp in ((1, False), (2, False), (2, True)):
        for packed in (False, True):
            common = {"tp": tp, "cp": 1, "sp": sp, "packed": packed, "form": "kda", "nope": True}
            cases.append(Case(**common))
            if packed == sp:
                cases.append(Case(**common, gpt=True, rope_type="rope", q_lora_rank=None))
    common = {"tp": 2, "cp": 1, "sp": True, "form": "kda", "nope": True, "gpt": True}
    cases.append(Case(**common, packed=True, recompute="full"))
    cases.append(Case(**common, experts=True))
    return cases


def _wide_cases() -> list[Case]:
    """Four tensor-parallel ranks, and eight ranks; what they share with two is checked above."""
    cases = []
    forms = ({}, {"form": "absorbed"}, {"form": "dsa"}, {"nope": True, "q_lora_rank": None})
    for sp in (False, True):
        for packed in (False, True):
            common = {"tp": 4, "cp": 1, "sp": sp, "packed": packed, "rope_type": "rope"}
            cases += [Case(**common, **form) for form in forms]
    common = {"tp": 4, "cp": 1, "sp": True, "packed": True}
    cases += [Case(**common, fused=False), Case(**common, down="column")]
    cases += [Case(**common, form="dsa_sparse_loss", kernels=True)]
    cases += [Case(**common, form="kda", nope=True), Case(**common, gpt=True)]
    cases.append(Case(**common, gpt=True, experts=True))
    for tp, cp in ((8, 1), (4, 2), (2, 4), (1, 8)):
        common = {"tp": tp, "cp": cp, "sp": tp > 1, "rope_type": "rope"}
        cases += [Case(**common, packed=True, form=form) for form in ("expanded", "absorbed")]
        cases.append(Case(**common, packed=True, form="dsa_sparse_loss"))
        cases += [Case(**common, form="dsa"), Case(**common, packed=True, nope=True)]
    common = {"sp": True, "gpt": True}
    cases.append(Case(tp=4, cp=2, **common, packed=True, form="dsa_sparse_loss"))
    cases.append(Case(tp=2, cp=4, **common, experts=True))
    return cases


CASES = _cases()
