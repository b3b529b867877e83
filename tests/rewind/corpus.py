"""Planted causes: what is changed in the script, on how many ranks, and what a search has to find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

FSDP2: Final = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "--fsdp_min_num_params", "1",
)  # fmt: skip
#: The index of the sample that is changed.
SAMPLE: Final = 111

Pieces = tuple[tuple[str, str], ...]

DATA: Final = "pass  # data"
MODEL: Final = "pass  # model"
BEGIN: Final = "pass  # begin"
UPDATED: Final = "pass  # updated"
TANH: Final = "self.act = nn.Tanh()"
LOG: Final = '{"loss": mean, "grad_norm": float(norm)}'
INNER: Final = "accelerator.unwrap_model(model)"

OUTLIER: Final = (DATA, f"self.targets[{SAMPLE}] = 50.0")
EXPLODES: Final = (UPDATED, f"_ = {INNER}.middle.weight.data.mul_(300) if progress.update == 23 else None")
EDITS: Final = (UPDATED, 'optimizer.param_groups[0]["lr"] *= 1e4 if progress.update == 15 else 1')


def overflows(limit: float) -> Pieces:
    """Put a module that computes in half precision in place of Tanh; it overflows where an input exceeds ``limit``."""
    scale = 65504 / limit
    return (
        (TANH, "self.act = Half()"),
        (
            "class Net(nn.Module):",
            "class Half(nn.Module):\n    def forward(self, inputs):\n"
            f"        return (inputs * {scale}).half().float() / {scale}\n\n\n"
            "class Net(nn.Module):",
        ),
    )


def flips(bit: int, ranks: str = "") -> tuple[str, str]:
    """Flip a bit of a weight after update 23, on some ranks."""
    flip = f"{INNER}.last.weight.data.view(torch.int32)[0, 3].bitwise_xor_(1 << {bit})"
    return UPDATED, f"_ = {flip} if progress.update == 23 {ranks} else None"


@final
@dataclass(frozen=True)
class Cause:
    """A planted cause.

    Attributes:
        planted: pieces of the script and their replacements; in a comparison, those of the other run.
        when: the condition; "" compares with a run without the cause.
        update: the first update, if it isn't the first one at which the condition holds in the log of each update.
        what: a part of the words of the finding; "" expects nothing.
        samples: whether the changed sample is named, and nothing else; None: any samples.
    """

    planted: Pieces
    when: str = ""
    update: int | None = None
    what: str = ""
    module: str = ""
    samples: bool | None = False
    rank: int | None = None
    ranks: int = 1
    flags: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict[str, int])


#: Searches in one run.
CAUSES: Final[dict[str, Cause]] = {
    "outlier": Cause((OUTLIER,), "loss > 20", what="input 1", samples=True),
    "outlier_2_ranks": Cause((OUTLIER,), "loss > 20", what="input 1", samples=True, ranks=2),
    "outlier_fsdp2": Cause((OUTLIER,), "loss > 20", what="input 1", samples=True, ranks=2, flags=FSDP2),
    "outlier_4_ranks": Cause((OUTLIER,), "loss > 20", what="input 1", samples=True, ranks=4),
    "outlier_in_parts": Cause((OUTLIER,), "grad_norm > 20", what="input 1", samples=True, numbers={"PARTS": 2}),
    "outlier_between_logs": Cause((OUTLIER,), "loss > 20", what="input 1", samples=True, numbers={"LOG_EVERY": 20}),
    "outlier_without_checkpoints": Cause(
        (OUTLIER,), "loss > 20", what="input 1", samples=True, numbers={"SAVE_EVERY": 1000}
    ),
    "nan_label": Cause(((DATA, f"self.targets[{SAMPLE}] = float('nan')"),), "not finite", what="input 1", samples=True),
    "nan_label_2_ranks": Cause(
        ((DATA, f"self.targets[{SAMPLE}] = float('nan')"),), "not finite", what="input 1", samples=True, ranks=2
    ),
    "nan_input_fsdp2": Cause(
        ((DATA, f"self.inputs[{SAMPLE}, 2] = float('nan')"),),
        "loss not finite",
        what="input 0",
        samples=True,
        ranks=2,
        flags=FSDP2,
    ),
    "poisoned_input": Cause(
        ((DATA, f"self.inputs[{SAMPLE}] *= 1e3"), (TANH, "self.act = nn.ReLU()")),
        "loss > 20",
        what="input 0",
        samples=True,
    ),
    "overflow_in_half": Cause(overflows(1.9), "not finite", what="output", module="act", samples=None),
    "overflow_by_a_sample": Cause(
        ((DATA, f"self.inputs[{SAMPLE}] *= 1e6"), *overflows(100.0)), "not finite", what="input 0", samples=True
    ),
    "exploding_layer": Cause((EXPLODES,), "loss > 20", what="weight", module="middle.weight"),
    "exploding_layer_fsdp2": Cause(
        (EXPLODES,), "loss > 20", what="weight", module="middle.weight", ranks=2, flags=FSDP2
    ),
    "exploding_layer_without_norm_in_log": Cause(
        (EXPLODES, (LOG, '{"accuracy": mean}')), "grad_norm > 50", update=24, what="weight", module="middle.weight"
    ),
    "flipped_exponent": Cause((flips(30),), "not finite", what="weight", module="last.weight"),
    "flipped_exponent_on_a_rank": Cause(
        (flips(30, "and accelerator.process_index == 1"),),
        "loss > 20",
        what="weight",
        module="last.weight",
        rank=1,
        ranks=2,
    ),
    "edited_rate": Cause((EDITS,), "lr > 1", update=16),
    "edited_rate_in_log": Cause((EDITS,), "loss > 20"),
}
#: Comparisons with a run without the cause.
OTHERS: Final[dict[str, Cause]] = {
    "code": Cause(((TANH, "self.act = nn.GELU()"),), update=1, what="output", module="act"),
    "code_fsdp2": Cause(((TANH, "self.act = nn.GELU()"),), update=1, what="output", module="act", ranks=2, flags=FSDP2),
    "rate": Cause((), update=1, what="learning rate", arguments=("--lr", "0.06")),
    "data_file": Cause(((DATA, f"self.inputs[{SAMPLE}, 1] += 1e-3"),), what="input 0", samples=True),
    "label_2_ranks": Cause(((DATA, f"self.targets[{SAMPLE}] *= -1"),), what="input 1", samples=True, ranks=2),
    "seed_of_a_rank": Cause(
        ((BEGIN, "_ = torch.manual_seed(9) if accelerator.process_index == 1 else None"),),
        update=1,
        what="output",
        module="drop",
        rank=1,
        ranks=2,
    ),
    "seed_of_a_rank_of_4": Cause(
        ((BEGIN, "_ = torch.manual_seed(9) if accelerator.process_index == 3 else None"),),
        update=1,
        what="output",
        module="drop",
        rank=3,
        ranks=4,
    ),
    "order": Cause(
        (("shuffle=True", "shuffle=True, generator=torch.Generator().manual_seed(8)"),),
        update=1,
        what="choice of samples",
        samples=None,
    ),
    "first_weights": Cause(
        ((MODEL, "model.middle.weight.data[0, 0] += 1e-3"),), update=1, what="weight", module="middle.weight"
    ),
    "flipped_mantissa": Cause((flips(3),), update=24, what="weight", module="last.weight"),
    "flipped_mantissa_fsdp2": Cause(
        ((UPDATED, f"_ = {INNER}.middle.weight.data.mul_(1.0001) if progress.update == 23 else None"),),
        update=24,
        what="weight",
        module="middle.weight",
        ranks=2,
        flags=FSDP2,
    ),
    "weight_decay": Cause((("momentum=0.5", "momentum=0.5, weight_decay=0.1"),), update=2, what="weight"),
    "loss_function": Cause((("mse_loss", "smooth_l1_loss"),), update=1, what="loss"),
    "dropout": Cause((("Dropout(0.1)", "Dropout(0.2)"),), update=1, what="output", module="drop"),
    "clipping": Cause((("100.0)", "0.1)"),), update=1, what="gradient of the weight"),
}
