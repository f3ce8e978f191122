"""One small network in every layout that torch has, and unsharded beside them.

A layout is built once per process and reset for every schedule.  `train` runs where
the layout lives, on every rank; `alone` runs the same events on the whole network.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from buoy.torch import GradScaler

ROWS, SEQUENCE, WIDTH, HIDDEN, OUT = 8, 4, 8, 16, 4


class Event(NamedTuple):
    """An overflow on one rank, in one of its gradients."""

    rank: int
    which: int
    value: float


class Schedule(NamedTuple):
    """What happens in a run, and how it is run."""

    events: tuple[Event | None, ...]
    optimizer: str = "sgd"
    max_norm: float | None = None
    by_hand: bool = False  # `unscale_` before anything else
    policy: str | None = None


class Run(NamedTuple):
    """What became of it, as one rank saw it."""

    scales: list[float]
    applied: list[bool]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Net(nn.Module):
    """Norm, up, tanh, down; every row has a sequence, for the parallel kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """A shared layer, and two experts that take half of the rows each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(WIDTH, HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, OUT) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.shared(x))
        halves = hidden.chunk(2)
        return torch.cat([e(h) for e, h in zip(self.experts, halves, strict=True)])


class Gained(nn.Module):
    """The network and one more parameter, which DDP will not know of."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Net()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, OUT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.gain


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step, the same for the same step."""
    source = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, SEQUENCE, WIDTH, generator=source)
    return x, torch.randn(ROWS, SEQUENCE, OUT, generator=source)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
mse = nn.functional.mse_loss


class Layout:
    """How a network lies on the ranks; this one lies on each of them whole."""

    size = 1
    fused = True  # torch's fused optimizers take it
    share = (0, 1)  # which part of each batch this rank works on
    whole: Any = Net  # the unsharded network
    options: ClassVar[dict[str, Any]] = {}  # what a scaler needs to know the norm

    def __init__(self) -> None:
        self.build()
        self.start = [local(p).detach().clone() for p in self.params()]

    def build(self) -> None:
        self.model: Any = Net()

    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def reset(self, scaler: Any) -> None:
        with torch.no_grad():
            for param, start in zip(self.params(), self.start, strict=True):
                local(param).copy_(start)

    def backward(self, scaler: Any, step: int) -> None:
        index, count = self.share
        x, y = (part.chunk(count)[index] for part in batch(step))
        scaler.scale(mse(self.model(x), y)).backward()

    def full(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


def local(tensor: Any) -> torch.Tensor:
    """Take this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Put every parameter together again, on every rank."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


class Ddp(Layout):
    size = 2

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        self.model = DistributedDataParallel(Net())

    def full(self) -> dict[str, torch.Tensor]:
        return gathered(self.model.module)


class DdpAndMore(Layout):
    """One parameter of the optimizer is not DDP's."""

    size = 2
    whole = Gained

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        self.model = Gained(DistributedDataParallel(Net()))

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        dist.all_reduce(self.model.gain.grad)
        self.model.gain.grad /= dist.get_world_size()

    def full(self) -> dict[str, torch.Tensor]:
        return {n.replace("module.", ""): p for n, p in gathered(self.model).items()}


class Fsdp1(Layout):
    size = 2
    original = True

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        self.model = FullyShardedDataParallel(
            Net(), use_orig_params=self.original, device_id=torch.device("cpu")
        )
        if self.original:
            self.options = {"model": self.model}

    def full(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            named = list(self.model.module.named_parameters())
            return {name: param.detach().clone() for name, param in named}


class Fsdp1Flat(Fsdp1):
    original = False


class Fsdp2(Layout):
    size = 2
    shape: tuple[int, ...] = (2,)

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        names = ("replica", "shard")[-len(self.shape) :]
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=names)
        self.model = Net()
        fully_shard(self.model.up, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def full(self) -> dict[str, torch.Tensor]:
        return gathered(self.model)


class Hsdp(Fsdp2):
    """Two replicas of two shards each."""

    size = 4
    shape = (2, 2)


class Tp(Layout):
    """Tensor parallel, the first gradient of the optimizer replicated."""

    size = 2

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.model = parallelize_module(Net(), mesh, {**self.plan(), **plan})

    def params(self) -> list[Any]:
        return super().params()[::-1]

    def plan(self) -> dict[str, Any]:
        return {
            "norm": SequenceParallel(),
            "": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)
            ),
            "up": ColwiseParallel(input_layouts=Shard(1)),
        }

    def full(self) -> dict[str, torch.Tensor]:
        return gathered(self.model)


class TpBare(Tp):
    """Without the norm: then ranks that part do not wait for one another."""

    def build(self) -> None:
        net = Net()
        net.norm = nn.Identity()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.model = parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


class TpMixed(Tp):
    """The norm is in no plan: a plain parameter beside DTensors."""

    fused = False

    def plan(self) -> dict[str, Any]:
        return {}


class FsdpTp(Tp):
    """FSDP2 over one dimension of a mesh, tensor parallel over the other."""

    size = 4

    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.share = (mesh["dp"].get_local_rank(), 2)
        plan = {
            **self.plan(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        self.model = parallelize_module(Net(), mesh["tp"], plan)
        fully_shard(self.model, mesh=mesh["dp"])


class Fsdp2Mixed(Layout):
    """FSDP2 for a part of the model; the rest is plain and averaged by hand."""

    size = 2
    fused = False

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        self.model = Net()
        fully_shard(self.model.up, mesh=init_device_mesh("cpu", (2,)))

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        for param in self.params():
            if not hasattr(param, "to_local"):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    def full(self) -> dict[str, torch.Tensor]:
        return gathered(self.model)


class ExpertParallel(Layout):
    """A layer sharded over all ranks; each expert over the half that holds it."""

    size = 4
    whole = Experts

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
        self.mine, row = mesh["ep"].get_local_rank(), mesh["dp"].get_local_rank()
        self.share = (2 * self.mine + row, 4)
        whole = Experts()
        self.shared = fully_shard(whole.shared, mesh=init_device_mesh("cpu", (4,)))
        self.expert = fully_shard(whole.experts[self.mine], mesh=mesh["dp"])
        self.model = lambda x: self.expert(torch.tanh(self.shared(x)))
        mine, columns = {*self.expert.parameters()}, mesh["ep"].get_group()
        self.options = {"norm_group": lambda p: columns if p in mine else None}

    def params(self) -> list[Any]:
        return [*self.expert.parameters(), *self.shared.parameters()]

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        for param in self.expert.parameters():  # averaged over 2 ranks, not over 4
            local(param.grad).mul_(0.5)

    def full(self) -> dict[str, torch.Tensor]:
        found = {f"shared.{n}": p for n, p in gathered(self.shared).items()}
        name = f"experts.{self.mine}"
        return {**found, **{f"{name}.{n}": p for n, p in gathered(self.expert).items()}}


class Pipe(Layout):
    """Two stages; the loss is known to the last alone."""

    size = 2
    kind: Any = ScheduleGPipe
    parts = 4

    def build(self) -> None:
        net, self.rank = Net(), dist.get_rank()
        first = nn.Sequential(net.norm, net.up, nn.Tanh())
        self.names = ("norm", "up") if self.rank == 0 else ("down",)
        self.mine = first if self.rank == 0 else net.down
        self.net = net
        self.options = {"norm_group": dist.group.WORLD}

    def params(self) -> list[Any]:
        return list(self.mine.parameters())

    def reset(self, scaler: Any) -> None:
        super().reset(scaler)
        rows = ROWS // self.parts
        wide = torch.zeros(rows, SEQUENCE, WIDTH if self.rank == 0 else HIDDEN)
        stage = PipelineStage(self.mine, self.rank, 2, torch.device("cpu"), (wide,))
        self.pipe = self.kind(stage, self.parts, loss_fn=scaler.loss_fn(mse))
        self.losses: list[torch.Tensor] = []

    def backward(self, scaler: Any, step: int) -> None:
        x, y = batch(step)
        if self.rank == 0:
            self.pipe.step(x)
        else:
            self.losses = []
            self.pipe.step(target=y, losses=self.losses)

    def full(self) -> dict[str, torch.Tensor]:
        named = self.net.named_parameters()
        return {n: p.detach().clone() for n, p in named if n.startswith(self.names)}


class Pipe1F1B(Pipe):
    kind = Schedule1F1B


LAYOUTS = {
    "ddp": Ddp,
    "ddp and more": DdpAndMore,
    "fsdp1": Fsdp1,
    "fsdp1 flat": Fsdp1Flat,
    "fsdp2": Fsdp2,
    "fsdp2 mixed": Fsdp2Mixed,
    "hsdp": Hsdp,
    "tp": Tp,
    "tp mixed": TpMixed,
    "fsdp2 x tp": FsdpTp,
    "experts": ExpertParallel,
    "gpipe": Pipe,
    "1f1b": Pipe1F1B,
}
OTHERS = {"tp bare": TpBare}
_BUILT: dict[str, Layout] = {}


def built(name: str) -> Layout:
    """Build a layout, once per process."""
    if name not in _BUILT:
        _BUILT[name] = {**LAYOUTS, **OTHERS}[name]()
    return _BUILT[name]


def train(name: str, schedule: Schedule) -> Run:
    """Run a schedule in a layout, on every rank."""
    return _run(built(name), schedule, dist.get_rank())


def alone(name: str, schedule: Schedule) -> Run:
    """Run it on the whole network, in this process; any event is an event."""
    whole = Layout()
    whole.model = LAYOUTS[name].whole()
    whole.start = [p.detach().clone() for p in whole.params()]
    return _run(whole, schedule, None)


def _run(layout: Layout, schedule: Schedule, rank: int | None) -> Run:
    how: Any = {"growth_interval": 2} if schedule.policy is None else {}
    how |= layout.options
    scaler = GradScaler("cpu", 2.0**10, policy=schedule.policy, **how)
    layout.reset(scaler)
    optimizer = OPTIMIZERS[schedule.optimizer](layout.params())
    found = Run([], [], [], {})
    for step, event in enumerate(schedule.events):
        optimizer.zero_grad()
        layout.backward(scaler, step)
        if event is not None and rank in (None, event.rank):
            spoil(layout.params(), event)
        norm = finish(scaler, optimizer, schedule)
        found.scales.append(scaler.get_scale())
        found.applied.append(scaler.last_step.applied)
        found.norms.append(norm)
    return found._replace(weights=layout.full())


def finish(scaler: Any, optimizer: Any, schedule: Schedule) -> float:
    """Do what comes after the backward pass; return the norm, if it was taken."""
    norm = 0.0
    if schedule.by_hand:
        scaler.unscale_(optimizer)
    if schedule.max_norm is not None:
        norm = scaler.clip_grad_norm_(optimizer, schedule.max_norm).item()
    scaler.step(optimizer)
    scaler.update()
    return norm


def spoil(params: list[Any], event: Event) -> None:
    """Write an inf or a NaN into one gradient's own part."""
    parts = [local(p.grad) for p in params if p.grad is not None]
    parts = [part for part in parts if part.numel()]
    part = parts[event.which % len(parts)]
    with torch.no_grad():
        part[(0,) * part.dim()] = event.value
