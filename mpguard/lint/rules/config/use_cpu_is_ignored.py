from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Good, Note, accelerate_config, any_of

#: Types that `accelerate launch` (1.15.0, `launch_command`) does not start through `simple_launcher`, the only launcher
#: that exports ACCELERATE_USE_CPU.
_NOT_SIMPLE = {"FSDP", "DEEPSPEED", "MEGATRON_LM"} | {
    f"MULTI_{device}" for device in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
}
#: Keys of what DeepSpeed moves from a GPU to the CPU or a disk.
_OFFLOADS = ("deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device")
_WITHOUT = {
    "FSDP": "without one FSDP is never applied and each process trains its own model",
    "DEEPSPEED": "without one a single process runs DeepSpeed on the CPU, and several stop with an error",
}


class UseCpuIsIgnored(ConfigRule):
    """`use_cpu: true` or `num_processes` with a `distributed_type` for which the launcher ignores it.

    ## Why is this bad
    `accelerate launch` (1.15.0) passes `use_cpu` to the workers only if it starts a single process. Under `FSDP`,
    `DEEPSPEED` and `MULTI_GPU` it does not: with a GPU the run uses the GPU. Without one FSDP is never applied (plain
    module, `DistributedType.NO`), `MULTI_GPU` with two processes runs two independent trainings, and DeepSpeed works
    with one process only.

    `MULTI_CPU` is started as one process, whatever `num_processes` is, unless `mpirun_config` names an MPI host file.
    The run then has one process, without a warning.

    ## What to do
    For the CPU: `distributed_type: MULTI_CPU`, started with `mpguard launch` or `torchrun` (and
    `ACCELERATE_USE_CPU=true`), or through MPI. For GPUs: remove `use_cpu`.

    ## Known limits
    `MULTI_CPU` is not reported with several machines, where `mpirun` is usually started by hand around
    `accelerate launch`, nor if the file names an mpguard recipe: `mpguard launch` starts all processes. `use_cpu` is
    not reported where DeepSpeed offloads to the CPU: such a run is one on GPUs.
    """

    code, name = "MPG811", "use-cpu-is-ignored"
    severity = "error"
    message = "`use_cpu: true` is ignored with `distributed_type: {kind}`: with a GPU the run uses it, {without}"
    help = "set `distributed_type: MULTI_CPU`, or remove `use_cpu` and run where there is a GPU"
    kinds = ("accelerate",)
    triggers = (any_of(b"use_cpu", b"MULTI_CPU"),)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
use_cpu: true  # !
fsdp_config:
  fsdp_version: 2
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
mpirun_config:
  mpirun_hostfile: /home/me/hostfile
""",
            name="mpi.yaml",
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        kind = document.entry("distributed_type")
        if kind is None or not isinstance(kind.value, str) or accelerate_config.is_sagemaker(document):
            return
        note = Note("this selects how the processes are started", kind.value_span)
        use_cpu = document.entry("use_cpu")
        if kind.value in _NOT_SIMPLE and use_cpu is not None and use_cpu.value in (True, "true", "True", "yes"):
            if any((each := document.entry(key)) is not None and each.value in ("cpu", "nvme") for key in _OFFLOADS):
                return
            without = _WITHOUT.get(kind.value, "without one each process trains its own model")
            yield self.at(use_cpu, notes=(note,), kind=kind.value, without=without)
        elif kind.value == "MULTI_CPU":
            yield from self._one_process(document, note)

    def _one_process(self, document: Document, note: Note) -> Iterator[Diagnostic]:
        from mpguard.lint import mp_yaml

        processes, machines, host_file = map(
            document.entry, ("num_processes", "num_machines", "mpirun_config.mpirun_hostfile")
        )
        several = processes is not None and isinstance(processes.value, int) and processes.value > 1
        here = machines is None or machines.value in (None, 0, 1)
        if (
            processes is None
            or not several
            or not here
            or (host_file is not None and host_file.value)
            or document.entry(mp_yaml.RECIPE)
        ):
            return
        yield self.at(
            processes,
            notes=(note,),
            message="`accelerate launch` starts one process for `MULTI_CPU`, not {asked}: no MPI host file is named",
            asked=processes.value,
            help="start it with `mpguard launch` or `torchrun`, or name a host file in `mpirun_config.mpirun_hostfile`",
        )
