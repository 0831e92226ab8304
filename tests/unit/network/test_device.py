"""The device of a rank, and what belongs to it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hvd_train.config import Config
from hvd_train.doctor.nvidia import Unusable
from hvd_train.errors import UsageError
from hvd_train.network import device
from hvd_train.world import cores
from hvd_train.world.cores import Cores
from hvd_train.world.world import Place

PROGRAM = """
import resource, torch
from hvd_train import Config
from hvd_train.network.device import choose_device
from hvd_train.world.world import LocalWorld

choose_device(Config().replace(device="cpu"), LocalWorld().place)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    torch.ones(25_000_000)  # 100 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False)])
def test_freed_memory_is_kept_for_the_next_step(variables: dict[str, str], kept: bool) -> None:
    """Large tensors take the places of those before them without a fault for each page, unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True)
    pages = 25_000_000 * 4 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) < 20 * pages) is kept, "of forty; some find their place only after a few"


@pytest.mark.parametrize(
    ("variable", "options"),
    [
        (None, [(-4, 0), (-1, 2**31 - 1)]),
        ("GLIBC_TUNABLES", []),
        ("MALLOC_MMAP_MAX_", []),
        ("MALLOC_MMAP_THRESHOLD_", []),
        ("MALLOC_TRIM_THRESHOLD_", []),
    ],
)
def test_malloc_is_left_to_whoever_configures_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, options: list[tuple[int, int]]
) -> None:
    """Else it maps nothing and trims nothing: the numbers are those of M_MMAP_MAX and M_TRIM_THRESHOLD in malloc.h."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    given: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: given.append(option))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    device.choose_device(Config().replace(device="cpu"), Place())
    assert given == options


def test_another_allocator_than_glibcs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """musl, for one, has no mallopt."""
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: SimpleNamespace())
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert device.choose_device(Config().replace(device="cpu"), Place()) == torch.device("cpu")


def has_malloc_of_glibc() -> bool:
    """Return whether malloc is glibc's, as nobody has configured it, and not one that was loaded before it."""
    configured = any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ)
    # (The address of malloc does not tell: in some builds of Python it is one of the program's own.)
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8")
    others = any(f"lib{name}malloc" in loaded for name in ("je", "tc", "mi"))
    return hasattr(ctypes.CDLL(None), "malloc_trim") and not configured and not others


@pytest.mark.skipif(not has_malloc_of_glibc(), reason="malloc is not that of glibc, or has been configured")
def test_freed_memory_goes_back_to_the_kernel() -> None:
    """Between pieces that stay, malloc keeps what was freed: here, what were a rank's own weights."""
    process, piece = psutil.Process(), 100_000  # bytes, of which malloc asks for no mapping of its own
    freed = [bytearray(b"1" * piece) for _ in range(1000)]
    stays = bytearray(b"1" * piece)
    freed.clear()
    before = process.memory_info().rss
    device.return_freed_memory()
    assert before - process.memory_info().rss > 800 * piece
    assert len(stays) == piece


def test_torch_computes_with_as_many_threads_as_the_rank_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host that each took all cores would wait for each other."""
    monkeypatch.setattr(cores, "of_this_process", lambda: Cores("host", tuple(range(6))))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    device.choose_device(Config().replace(device="cpu"), Place(0, 2, 0, 2))
    assert threads == [3]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two GPUs, as far as torch says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # what `choose_device` changes is put back


def test_each_rank_of_a_host_has_a_gpu_of_its_own(gpus: None) -> None:
    """By its local rank, among all GPUs or among those that are named."""
    places = [Place(3, 4, local_rank, 2) for local_rank in range(2)]
    assert [device.choose_device(Config(), place).index for place in places] == [0, 1]
    named = Config().replace(gpu_ids=(1, 0))
    assert [device.choose_device(named, place).index for place in places] == [1, 0]
    assert device.choose_device(Config().replace(device="cpu"), places[0]).type == "cpu"


def test_gpus_that_are_not_there_are_an_error_of_use(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than ranks, one that is named and missing, or none at all."""
    with monkeypatch.context() as elastic:
        elastic.setenv("HOROVOD_ELASTIC", "1")
        with pytest.raises(UsageError, match="3 ranks on this host but 2 GPUs"):
            device.choose_device(Config(), Place(0, 3, 0, 3))
    with pytest.raises(UsageError, match="--gpu-ids: there is no GPU 2 on this host; they are 0 to 1"):
        device.choose_device(Config().replace(gpu_ids=(2,)), Place())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(device.nvidia, "unusable", lambda cuda: None)
    with pytest.raises(UsageError, match="--device cuda: torch sees no GPU here"):
        device.choose_device(Config().replace(device="cuda"), Place())
    with pytest.raises(UsageError, match="--decode gpu: torch sees no GPU here; type --decode cpu"):
        device.choose_device(Config().replace(data="folder", data_dir=Path(), decode="gpu"), Place())


@pytest.mark.parametrize("elastic", [False, True])
def test_a_launcher_may_give_each_rank_a_gpu_of_its_own(
    gpus: None, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """Each sees but its own then; where NCCL lets ranks share GPUs, they take the GPUs in turn."""
    monkeypatch.setenv("HOROVOD_ELASTIC", str(int(elastic)))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(elastic)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device.choose_device(Config(), Place(n, 4, n, 4)).index for n in range(4)] == [0, 0, 0, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device.choose_device(Config(), Place(n, 4, n, 4)).index for n in range(4)] == [0, 1, 0, 1]


def test_ranks_with_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless NCCL is told that ranks share GPUs; and all ranks compute on GPUs, or all on CPUs."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    for identities in (["a", "b", "c"], ["", ""], ["a"], [""]):
        device.check_own_gpus(identities)
    with pytest.raises(UsageError, match="ranks 1 and 3 have the same GPU: start one rank per GPU"):
        device.check_own_gpus(["a", "b", "c", "b"])
    with pytest.raises(UsageError, match="rank 1 sees no GPU, and others do: type --device cpu"):
        device.check_own_gpus(["a", "", "c"])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    device.check_own_gpus(["a", "b", "c", "b"])


def test_a_gpu_for_which_horovod_has_no_code_is_an_error_of_use(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where ranks reduce by Horovod, and where its build says for what it is compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    monkeypatch.setattr(device.gpu_code, "compiled_for", lambda: [80, 90])
    monkeypatch.setattr(device.launcher, "launched", lambda environ: None)
    device.choose_device(Config(), Place())
    monkeypatch.setattr(device.launcher, "launched", lambda environ: "horovodrun" if environ is os.environ else None)
    with pytest.raises(UsageError, match=r"not compiled for V100 \(compute capability 7.0\): .*CC_LIST=70,80,90 "):
        device.choose_device(Config(), Place())
    monkeypatch.setattr(device.gpu_code, "compiled_for", lambda: None)
    device.choose_device(Config(), Place())


def test_a_gpu_repeats_itself_where_that_is_asked_for(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else cuDNN may try what is fastest; cuBLAS needs a workspace that it does not choose itself."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of before")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device.choose_device(Config(), Place(1, 2, 1, 2))
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        device.choose_device(Config().replace(deterministic=True), Place())
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert chosen == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that this process may use count, and each rank has at least one."""
    monkeypatch.setattr(cores, "of_this_process", lambda: Cores("host", tuple(range(6))))
    assert [device.num_cores(Place(local_size=ranks)) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert device.num_cores(Place(local_size=4, num_cores=6)) == 6, "what the ranks have found out counts"


def test_formats_follow_the_device_unless_they_are_chosen() -> None:
    """fp16 travels from GPUs only, and channels are last where a GPU computes with few bits."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [device.wire_format(Config(), one) for one in (cpu, gpu)] == ["none", "fp16"]
    assert [device.wire_dtype(Config(), one) for one in (cpu, gpu)] == [None, torch.float16]
    for chosen, dtype in (("none", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        config = Config().replace(compression=chosen)
        assert [device.wire_dtype(config, one) for one in (cpu, gpu)] == [dtype] * 2
    mixed = Config().replace(precision="bf16")
    assert [device.uses_channels_last(config, gpu) for config in (Config(), mixed)] == [False, True]
    assert not device.uses_channels_last(mixed, cpu)
    assert device.uses_channels_last(Config().replace(channels_last="on"), cpu)


def test_the_loss_scale_is_there_where_something_is_fp16() -> None:
    """The first one for fp16 arithmetic is torch's own, for the wire alone one that loses no step; for bf16 none."""
    cpu = torch.device("cpu")
    fp16 = Config().replace(precision="fp16", compression="fp16")
    assert device.loss_scaler(fp16, cpu).get_scale() == 65536
    assert device.loss_scaler(fp16.replace(compression="bf16"), cpu).get_scale() == 65536
    assert device.loss_scaler(Config().replace(compression="fp16"), cpu).get_scale() == 1024
    for without in (Config(), Config().replace(compression="bf16"), Config().replace(precision="bf16")):
        assert not device.loss_scaler(without, cpu).is_enabled()


def test_the_seed_decides_random_numbers() -> None:
    """The same number gives the same draws."""
    draws = []
    for number in (1, 2, 1):
        device.seed(torch.device("cpu"), number)
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_deterministic_means_that_torch_refuses_what_is_not() -> None:
    """Asked for, it holds on a CPU as well."""
    try:
        device.choose_device(Config().replace(device="cpu", deterministic=True), Place())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gpu_draws_by_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from a generator of its own."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    device.seed(torch.device("cpu"), 3)
    device.seed(torch.device("cuda", 0), 5)
    assert seeds == [5]


def test_a_gpu_is_called_by_the_name_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU that the rank has; a CPU has no such name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda of: f"GPU {of.index}")
    assert [device.gpu_name(torch.device(kind)) for kind in ("cuda:1", "cpu")] == ["GPU 1", None]


def test_only_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a CPU is done when it returns; that of a GPU is waited for on the rank's own."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for kind in ("cpu", "cuda:1"):
        device.synchronize(torch.device(kind))
    assert waited == [torch.device("cuda", 1)]


class Event:
    """A moment in the queue of a GPU, half a second after the one before, that is not known until it is waited for."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.known = -1, False

    def record(self) -> None:
        """Stand in the queue from now on."""
        self.at, Event.recorded = Event.recorded * 500, Event.recorded + 1

    def synchronize(self) -> None:
        """Wait for it."""
        self.known = True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from here to `end`."""
        assert end.known
        return float(end.at - self.at)


def test_phases_on_a_gpu_are_timed_in_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stamp takes its place among the work that is queued, and is waited for when the time is asked for."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    split = device.split_on(torch.device("cuda", 0))
    for phase in ("data", "forward", "forward", "optimizer"):
        split.mark(phase)
    spent = split.take()
    assert spent is not None
    phases = {"data": 0.5, "forward": 1.0, "optimizer": 0.5}
    assert {phase: seconds for phase, seconds in spent.items() if seconds} == phases
    device.split_on(torch.device("cpu")).mark("data")
    assert Event.recorded == 5, "none of them for a CPU"


@pytest.mark.parametrize(("precision", "wire", "scale"), [("fp16", "none", 65536.0), ("fp32", "fp16", 1024.0)])
def test_a_rank_without_a_slot_in_the_first_step_has_a_loss_scale(precision: str, wire: str, scale: float) -> None:
    """It divides the gradients that the other ranks have sent it by the scale, though it has scaled no loss itself."""
    with torch.device("meta"):  # the default, which is not where the model is
        scaler = device.loss_scaler(Config().replace(precision=precision, compression=wire), torch.device("cpu"))
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 3.0 * scale)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-3.0, -3.0]
    assert scaler._device == "cpu"


@pytest.mark.parametrize(("available", "count"), [(False, 2), (True, 0)])
def test_without_a_gpu_that_works_a_rank_computes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, available: bool, count: int
) -> None:
    """Unless GPUs are asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(device.nvidia, "unusable", lambda cuda: None)
    assert device.choose_device(Config(), Place()) == torch.device("cpu")
    with pytest.raises(UsageError, match="--device cuda: torch sees no GPU here"):
        device.choose_device(Config().replace(device="cuda"), Place())


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who has GPUs trains on the CPU unasked; whoever asks for it does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(device.nvidia, "unusable", lambda cuda: Unusable(f"no driver for {cuda}", "install one"))
    for config in (Config(), Config().replace(device="cuda")):
        with pytest.raises(UsageError, match=r"no driver for 13.2; install one, or type --device cpu"):
            device.choose_device(config, Place())
    assert device.choose_device(Config().replace(device="cpu"), Place()) == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.choose_device(Config(), Place()) == torch.device("cpu"), "this torch is for CPUs"


def test_one_gpu_is_enough_for_one_rank(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for or not."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for config in (Config(), Config().replace(device="cuda")):
        assert device.choose_device(config, Place()) == torch.device("cuda", 0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_arithmetic_is_the_one_that_is_asked_for(precision: str, dtype: torch.dtype) -> None:
    """On the device of the rank; plain numbers need no context at all."""
    cpu = torch.device("cpu")
    assert isinstance(device.autocast("fp32", cpu), nullcontext)
    with device.autocast(precision, cpu):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == dtype
    assert not torch.is_autocast_enabled("cpu")
