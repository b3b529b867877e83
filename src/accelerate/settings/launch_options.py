"""Options of the launch: processes, machines, rendezvous, logs."""

from __future__ import annotations

from .labels import ComputeEnvironment, DistributedType
from .option import OptionGroup, option, option_group

DISTRIBUTED_TYPES = (*(kind.value for kind in DistributedType), "TPU")


@option_group
class LaunchOptions(OptionGroup, title="Launch", key="", flag=""):
    """The processes that the launcher starts, their machines, and their rendezvous."""

    compute_environment: str = option(
        "LOCAL_MACHINE",
        "Whose machines run the training.",
        flag=None,
        choices=ComputeEnvironment,
        question="In which compute environment are you running?",
    )
    distributed_type: str | None = option(
        None,
        "How the run is distributed; decided from the other settings when it is not given.",
        flag=None,
        choices=DISTRIBUTED_TYPES,
        question="Which type of machine are you using?",
    )
    multi_gpu: bool = option(False, "Start one process per GPU (or another accelerator).", key=None, switch=True)
    use_tpu: bool = option(False, "Start one process per TPU core.", key=None, flag="--tpu", switch=True)
    num_processes: int | None = option(
        None,
        "The number of processes over all machines; -1, or not given: one per device (one on the CPU).",
        aliases={"-1": None},
        minimum=1,
        question="How many processes (devices) in total will be used for distributed training?",
    )
    num_machines: int = option(
        1,
        "The number of machines.",
        flag_aliases=("--nnodes",),
        minimum=1,
        question="How many different machines will you use (use more than 1 for multi-node training)?",
    )
    machine_rank: int = option(
        0,
        "The rank of this machine, from 0.",
        flag_aliases=("--node_rank",),
        minimum=0,
        question="What is the rank of this machine?",
    )
    gpu_ids: str | None = option(
        None,
        "The ids of the devices to use on this machine, such as 0,1; or all.",
        question="What GPU(s) (by id) should be used for training on this machine as a comma-separated list?",
    )
    main_process_ip: str | None = option(
        None,
        "The address of machine 0.",
        flag_aliases=("--master_addr",),
        question="What is the IP address of the machine that will host the main process?",
    )
    main_process_port: int | None = option(
        None,
        "The port of machine 0; 0 chooses a free one.",
        flag_aliases=("--master_port",),
        minimum=0,
        maximum=65535,
        question="What is the port you will use to communicate with the main process?",
    )
    same_network: bool = option(
        False,
        "All machines are on one local network.",
        switch=True,
        question="Are all the machines on the same local network?",
    )
    rdzv_backend: str = option(
        "static",
        "How the machines find each other: static, c10d, etcd, ...",
        question="What rendezvous backend will you use? ('static', 'c10d', ...)",
        flag_default="static",
    )
    rdzv_conf: str = option("", "More rendezvous settings, as key1=value1,key2=value2.", key=None, flag_default="")
    main_training_function: str = option(
        "main",
        "The function of the script that trains (TPU and notebooks).",
        question="What is the name of the function in your script that every process should run?",
    )
    max_restarts: int = option(
        0, "How many times a failed group of processes is started again.", key=None, minimum=0, flag_default=0
    )
    keep_replicas: int = option(
        0,
        "Go on without a restart when a rank is lost, and replace so many lost ranks by new processes.",
        key=None,
        minimum=0,
        flag_default=0,
        guest="fault_tolerance",
    )
    min_replicas: int = option(
        1,
        "With fewer living ranks under --keep_replicas, these save and end; --max_restarts starts the run again.",
        key=None,
        minimum=1,
        flag_default=1,
        guest="fault_tolerance",
    )
    monitor_interval: float = option(
        0.1, "Seconds between two looks at the processes.", key=None, minimum=0, flag_default=0.1
    )
    role: str = option("default", "The name of the group of processes in logs.", key=None, flag_default="default")
    tee: str = option(
        "0",
        "Show the rank before each line of: 0 no output, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:1.",
        key=None,
        flag_aliases=("-t",),
        flag_default="0",
    )
    log_dir: str | None = option(
        None, "Also write the outputs to files in this folder, one per rank and stream.", key=None
    )
    num_cpu_threads_per_process: int | None = option(
        None, "Threads per process (OMP_NUM_THREADS).", key=None, minimum=1
    )
    module: bool = option(
        False,
        "Treat the script as a module, as `python -m` does.",
        key=None,
        flag_aliases=("-m",),
        switch=True,
        flag_default=None,
    )
    no_python: bool = option(
        False, "Run the script as it is, without `python` in front.", key=None, switch=True, flag_default=None
    )
    pretend: int | None = option(
        None,
        "Simulate one rank of a job with so many processes, and print its memory, samples, collectives and files.",
        key=None,
        minimum=1,
        guest="pretend",
    )
    rank: int = option(0, "The rank that --pretend runs.", key=None, minimum=0, flag_default=0, guest="pretend")
    num_steps: int = option(
        1, "The optimizer steps after which --pretend reports.", key=None, minimum=1, flag_default=1, guest="pretend"
    )
    quiet: bool = option(
        False,
        "Show nothing of the launcher's own traceback on failure.",
        key=None,
        flag_aliases=("-q",),
        switch=True,
        flag_default=None,
    )


@option_group
class MpiOptions(OptionGroup, title="MPI", section="mpirun_config", key="", flag=""):
    """Options of mpirun."""

    mpirun_hostfile: str | None = option(
        None,
        "The file that lists the hosts; given, CPU processes are started through mpirun.",
        question="What is the location of the hostfile for mpirun?",
    )
