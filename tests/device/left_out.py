"""The tests that don't run on the imitated accelerator, by name, and why."""

from __future__ import annotations

from typing import Final

_FORK = "computes in the test's process and in its forks; torch's autograd threads of a device survive no fork"
_HOST = "uses values of the CPU together with the model's"
_DATA = "torch gives parameters of the host data on the device, which devices of extensions refuse"
_TRACED = "torch can't trace what this mode puts around its functions"

LEFT_OUT: Final[dict[str, str]] = {
    "multi/test_averaging.py::test_two_ranks_hold_the_same_average": _FORK,
    "multi/test_averaging.py::test_an_average_saved_in_shards_continues_on_one_process": _FORK,
    "multi/test_accelerator.py::test_compressed_gradients_are_the_same_on_every_rank_and_near_the_mean": _HOST,
    "multi/test_accelerator.py::test_other_methods_and_attributes_of_a_replica_are_the_models_own": _HOST,
    "multi/test_accelerator.py::test_gradients_stay_local_in_a_window_when_the_model_inside_the_replica_is_compiled": (
        _TRACED
    ),
    "multi/test_collectives.py::test_a_mismatch_at_module_level_names_its_line": "starts programs that ask for the CPU",
    "multi/test_coordinated_retry.py::test_ranks_that_share_samples_give_a_pass_up_too[cp, a ring]": (
        "a ring of ranks has kernels for CUDA and the CPU only, so it is refused by name"
    ),
    "multi/test_fsdp1.py::test_losses_norms_and_weights_are_those_of_one_process[offloaded]": _DATA,
    "multi/test_fsdp2.py::test_compiled_models_train_as_one_process": _TRACED,
    "multi/test_micro_batches.py::test_other_errors_pass_and_leave_the_gradients_alone": _HOST,
    "multi/test_gathering.py::test_every_output_is_that_of_bare_evaluation": "makes arrays of NumPy from batches",
}
