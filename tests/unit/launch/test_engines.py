"""Plans are functions of settings, program and host: nothing here starts a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate.cores import num_cores
from accelerate.errors import SettingError
from accelerate.launch.choose import choose, engines
from accelerate.launch.engine import PortInUse, without_effect
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.preflight import Host, this_host
from accelerate.settings.run import Settings, collect

CPU_HOST = Host(name="box", num_cores=8, free_port=40000)
GPU_HOST = replace(CPU_HOST, kind="cuda", num_devices=4, visible_devices="CUDA_VISIBLE_DEVICES")
PROGRAM = Program("train.py", ("--lr", "1"))


def settings(environment: dict[str, str] | None = None, **flags: Any) -> Settings:
    return collect({}, environment or {}, flags=flags)


def plan(chosen: Settings, host: Host = CPU_HOST) -> LaunchPlan:
    return choose(chosen, host).plan(chosen, PROGRAM, host)


def test_the_order_of_engines_can_be_read() -> None:
    assert [engine.name for engine in engines()] == [
        "fault_tolerant",
        "pretended",
        "sagemaker",
        "kubernetes",
        "ray",
        "slurm",
        "mpirun",
        "deepspeed",
        "tpu",
        "torchrun",
        "local",
        "simple",
    ]


@pytest.mark.parametrize(
    ("flags", "host", "engine"),
    [
        ({"cpu": True}, CPU_HOST, "simple"),
        ({}, CPU_HOST, "simple"),
        ({}, GPU_HOST, "local"),
        ({"num_processes": 1}, GPU_HOST, "simple"),
        ({"cpu": True, "num_processes": 2}, CPU_HOST, "local"),
        ({"cpu": True, "log_dir": "logs"}, CPU_HOST, "local"),
        ({"cpu": True, "tee": "3"}, CPU_HOST, "local"),
        ({"cpu": True, "num_processes": 2, "max_restarts": 1}, CPU_HOST, "torchrun"),
        ({"cpu": True, "num_processes": 2, "max_restarts": 1, "keep_replicas": 1}, CPU_HOST, "fault_tolerant"),
        ({"cpu": True, "num_processes": 2, "rdzv_backend": "c10d"}, CPU_HOST, "torchrun"),
        (
            {"cpu": True, "num_processes": 4, "num_machines": 2, "main_process_ip": "a", "main_process_port": 1},
            CPU_HOST,
            "torchrun",
        ),
    ],
)
def test_the_first_engine_that_suits_is_chosen(flags: dict[str, Any], host: Host, engine: str) -> None:
    assert choose(settings(**flags), host).name == engine


def test_one_process_has_no_ranks_but_the_runs_settings() -> None:
    made = plan(settings(cpu=True, mixed_precision="bf16"))
    assert made.argv[1:] == ("train.py", "--lr", "1")
    assert made.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert made.environment["ACCELERATE_USE_CPU"] == "true"
    assert made.environment["OMP_NUM_THREADS"] == "8"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(made.environment)


def test_two_cpu_processes_are_two_ranks_that_meet_on_the_loopback() -> None:
    made = plan(settings(cpu=True, num_processes=2))
    assert [dict(rank) for rank in made.ranks] == [
        {"RANK": "0", "LOCAL_RANK": "0", "ROLE_RANK": "0"},
        {"RANK": "1", "LOCAL_RANK": "1", "ROLE_RANK": "1"},
    ]
    expected = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "4",
    }
    assert expected.items() <= made.environment.items()
    assert made.num_processes == 2


def test_without_a_number_there_is_one_process_a_device() -> None:
    assert len(plan(settings(), GPU_HOST).ranks) == 4


def test_named_devices_are_the_visible_ones_also_where_none_was_found() -> None:
    made = plan(settings(gpu_ids="1,3", num_processes=2))
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_rank_finds_what_torchrun_documents_and_nothing_of_a_launcher_around_it() -> None:
    around = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    made = plan(settings(cpu=True, num_processes=2, role="trainer"), replace(CPU_HOST, environment=around))
    found = next(made.environments(around))
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # else rank 0 would look for a store that nobody keeps
    assert (found["RANK"], found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("0", "0", "1")
    assert (found["ROLE_NAME"], found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("trainer", "0", "2")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")


def test_one_process_inside_a_rank_joins_its_world_with_a_word_unless_a_world_of_one_was_asked_for() -> None:
    around = {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    host = replace(CPU_HOST, environment=around)
    joined = plan(settings(cpu=True), host)
    assert next(joined.environments(around))["RANK"] == "1"
    assert "joins as rank 1 of 2" in joined.notes[0] and "--num_processes 1" in joined.notes[0]
    alone = plan(settings(cpu=True, num_processes=1), host)
    found = next(alone.environments(around))
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("0", "1", "40000")
    assert alone.notes == ()


def test_a_pods_own_rank_is_joined_whatever_number_was_asked_for() -> None:
    around = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}  # as Kubeflow sets them: not a launcher's rank
    made = plan(settings(cpu=True, num_processes=1), replace(CPU_HOST, environment=around))
    assert "RANK" not in made.environment and made.notes == ()


def test_several_devices_on_a_host_with_one_are_refused() -> None:
    with pytest.raises(SettingError, match=r"multi_gpu.*at least 2 processes, but box has 1 accelerator"):
        plan(settings(multi_gpu=True), replace(GPU_HOST, num_devices=1))


def test_named_devices_are_the_visible_ones_and_give_the_number() -> None:
    made = plan(settings(gpu_ids="1,3"), GPU_HOST)
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert len(made.ranks) == 2


def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(SettingError, match=r"5 processes .*--num_processes.* host box has 4"):
        plan(settings(num_processes=5, multi_gpu=True), GPU_HOST)


def test_threads_given_by_flag_win_over_the_environment_and_that_over_the_default() -> None:
    flagged = plan(
        settings(cpu=True, num_cpu_threads_per_process=3), replace(CPU_HOST, environment={"OMP_NUM_THREADS": "5"})
    )
    assert flagged.environment["OMP_NUM_THREADS"] == "3"
    inherited = plan(settings(cpu=True), replace(CPU_HOST, environment={"OMP_NUM_THREADS": "5"}))
    assert "OMP_NUM_THREADS" not in inherited.environment
    assert plan(settings(num_processes=2), GPU_HOST).environment["OMP_NUM_THREADS"] == "1"


def test_a_busy_port_that_was_named_is_refused_before_anything_starts() -> None:
    with pytest.raises(PortInUse, match=r"Port 5000 .*--main_process_port.*in use"):
        plan(
            settings(cpu=True, num_processes=2, main_process_port=5000), replace(CPU_HOST, busy_ports=frozenset({5000}))
        )


def test_a_busy_default_port_is_replaced_with_a_note() -> None:
    made = plan(settings(cpu=True, num_processes=2), replace(CPU_HOST, busy_ports=frozenset({29500})))
    assert made.environment["MASTER_PORT"] == "40000"
    assert "29500 is in use" in made.notes[0]


def test_port_zero_is_any_free_port() -> None:
    made = plan(settings(cpu=True, num_processes=2, main_process_port=0))
    assert made.environment["MASTER_PORT"] == "40000"


def options(made: LaunchPlan) -> dict[str, str]:
    words = list(made.argv[3:])
    found: dict[str, str] = {}
    while words and words[0].startswith("--") and words[0] not in ("--module", "--no-python"):
        name, value, *words = words
        found[name] = value
    return found


def test_several_machines_share_the_processes_evenly() -> None:
    flags = {
        "num_machines": 2,
        "machine_rank": 1,
        "num_processes": 4,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 7,
    }
    made = plan(settings(cpu=True, **flags))
    expected = {
        "--nproc-per-node": "2",
        "--nnodes": "2",
        "--node-rank": "1",
        "--master-addr": "10.0.0.1",
        "--master-port": "7",
    }
    assert expected.items() <= options(made).items()
    assert made.argv[1:3] == ("-m", "torch.distributed.run")
    assert made.argv[-3:] == ("train.py", "--lr", "1")


def test_an_explicit_rendezvous_is_an_endpoint() -> None:
    made = plan(settings(cpu=True, num_processes=2, rdzv_backend="c10d", main_process_port=7, rdzv_conf="a=1"))
    expected = {"--rdzv-backend": "c10d", "--rdzv-endpoint": "127.0.0.1:7", "--rdzv-conf": "a=1"}
    assert expected.items() <= options(made).items()


def test_a_port_that_is_busy_on_machine_0_is_refused() -> None:
    flags = {"num_machines": 2, "num_processes": 2, "main_process_ip": "10.0.0.1", "main_process_port": 7}
    with pytest.raises(ConnectionError, match="Port 7 is in use on box"):
        plan(settings(cpu=True, **flags), replace(CPU_HOST, busy_ports=frozenset({7})))


def test_an_engine_can_be_named() -> None:
    assert choose(settings(cpu=True, num_processes=1, launcher="torchrun"), CPU_HOST).name == "torchrun"
    assert choose(settings(cpu=True, num_processes=1, launcher="local"), CPU_HOST).name == "local"


def test_a_named_engine_that_cant_do_the_rest_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--launcher local.*contradicts.*--max_restarts 2"):
        choose(settings(cpu=True, launcher="local", max_restarts=2), CPU_HOST)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"num_processes": 2, "rdzv_backend": "c10d", "keep_replicas": 1}, r"--keep_replicas 1.*start 'torchrun'"),
        ({"num_processes": 1, "max_restarts": 1, "keep_replicas": 1}, r"--keep_replicas 1.*at least 2"),
        (
            {"num_processes": 2, "keep_replicas": 1, "min_replicas": 3},
            r"--min_replicas 3.* is more than the 2 replicas",
        ),
        ({"num_processes": 2, "min_replicas": 2}, r"--min_replicas 2.*--keep_replicas N"),
    ],
)
def test_what_cannot_keep_replicas_is_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        plan(settings(cpu=True, **flags))


@pytest.mark.parametrize(
    ("axes", "sharded", "size"),
    [({"pp": 2}, False, 2), ({"pp": 2, "dp_shard": 2}, True, 4), ({"dp_shard": 2, "tp": 2}, True, 4)],
    ids=str,
)
def test_replicas_that_are_kept_may_have_several_ranks(axes: dict[str, int], sharded: bool, size: int) -> None:
    sizes = {f"parallelism_config_{axis}_size": degree for axis, degree in {"dp_replicate": 2, **axes}.items()}
    fsdp = {"use_fsdp": True, "fsdp_version": 2} if sharded else {}
    flags = {"num_processes": 2 * size, "keep_replicas": 1, "use_parallelism_config": True, **sizes, **fsdp}
    assert plan(settings(cpu=True, **flags)).engine_options["replica_size"] == size
    hosts = {"num_machines": 4, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    assert plan(settings(cpu=True, **flags, **hosts)).engine_options["replica_size"] == size  # over two of them
    with pytest.raises(SettingError, match=f"two or more replicas of several.* has {size} ranks"):
        plan(settings(cpu=True, **{**flags, "parallelism_config_dp_replicate_size": 1, "num_processes": size}))


def test_kept_replicas_of_several_machines_are_numbered_over_all() -> None:
    machines = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 1234}
    flags = {"num_processes": 4, "keep_replicas": 1, "min_replicas": 3, "lost_after_seconds": 9.5}
    made = plan(settings(cpu=True, **machines, **flags))
    assert made.engine.startswith("fault_tolerant: 2 processes on this host")
    assert [dict(rank) for rank in made.ranks] == [
        {"RANK": str(2 + local), "LOCAL_RANK": str(local), "ROLE_RANK": str(2 + local)} for local in range(2)
    ]
    expected = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert expected.items() <= made.environment.items()
    assert (made.environment["MASTER_ADDR"], made.environment["MASTER_PORT"]) == ("10.0.0.1", "1234")
    assert made.engine_options["lost_after_seconds"] == 9.5 and made.environment["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("changes", [{"main_process_ip": None}, {"machine_rank": 2}, {"main_process_port": 0}])
def test_kept_replicas_of_several_machines_need_an_address(changes: dict[str, Any]) -> None:
    given = {"main_process_ip": "10.0.0.1", "machine_rank": 1, "main_process_port": 1234, **changes}
    flags = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(SettingError, match=next(iter(changes))):
        plan(settings(cpu=True, num_machines=2, num_processes=4, keep_replicas=1, **flags))


@pytest.mark.parametrize(
    "flags", [{"multi_gpu": True, "num_processes": 2}, {"gpu_ids": "0,1"}, {"gpu_ids": "0", "num_processes": 1}]
)
def test_gpus_that_arent_there_are_noted(flags: dict[str, Any]) -> None:
    (note,) = plan(settings(**flags)).notes
    assert "no accelerator was found on box" in note


def test_some_accelerate_use_variable_is_always_set() -> None:
    for chosen in (settings(), settings(cpu=True, num_processes=2)):
        assert any(name.startswith("ACCELERATE_USE_") for name in plan(chosen).environment)


def test_this_host_is_read_without_torch() -> None:
    host = this_host({}, cpu=True, port=None)
    assert host.kind == "cpu" and host.free_port > 0
    assert host.num_cores == num_cores() >= 1


#: Flags by which each engine is chosen.
ENGINES = {
    "simple": {},
    "local": {"num_processes": 2},
    "torchrun": {"num_processes": 2, "launcher": "torchrun"},
    "fault_tolerant": {"num_processes": 2, "keep_replicas": 1},
    "mpirun": {"num_processes": 2, "launcher": "mpirun"},
    "ray": {"num_processes": 2, "launcher": "ray"},
    "slurm": {"num_processes": 2, "launcher": "slurm"},
    "kubernetes": {"num_processes": 2, "launcher": "kubernetes", "k8s_image": "image"},
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("option", [{"tee": "3"}, {"log_dir": "logs"}, {"role": "trainer"}, {"max_restarts": 2}])
def test_an_option_is_followed_or_said_to_have_no_effect(name: str, option: dict[str, Any]) -> None:
    plain, chosen = settings(cpu=True, **ENGINES[name]), settings(cpu=True, **ENGINES[name], **option)
    (flag, value), engine = next(iter(option.items())), choose(chosen, CPU_HOST)
    try:
        made = engine.plan(chosen, PROGRAM, CPU_HOST)
    except SettingError as refusal:
        assert f"--{flag}" in str(refusal)
        return
    notes = without_effect(engine, chosen, PROGRAM, CPU_HOST, made)
    is_followed = engine is not choose(plain, CPU_HOST) or made != engine.plan(plain, PROGRAM, CPU_HOST)
    assert is_followed or notes == (
        f"`--{flag} {value}` (flag --{flag}) has no effect: {made.engine.partition(':')[0]} doesn't follow it",
    )
    assert not (is_followed and notes)


def test_what_no_engine_is_asked_for_gets_no_note() -> None:
    chosen = settings(cpu=True, num_processes=2, launcher="mpirun", max_restarts=0)
    engine = choose(chosen, CPU_HOST)
    assert without_effect(engine, chosen, PROGRAM, CPU_HOST, engine.plan(chosen, PROGRAM, CPU_HOST)) == ()
