"""One network whose parameters lie on the ranks in every way that a norm must know.

Stages and experts are real modules of one rank each; the rest of the network, which
they need for a forward pass, is a frozen copy.
"""

import math
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from layouts import OPTIMIZERS, Experts, Layout, Net, batch, local, mse
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from buoy._backends import torch as backend
from buoy.torch import GradScaler, RankMismatchError

sys.path.insert(0, str(Path(__file__).parents[1]))
CPU = torch.device("cpu")


def average(params: list[Any], group: Any = None) -> None:
    """Average gradients over the ranks of a group."""
    for param in params:
        part = local(param.grad)
        dist.all_reduce(part, group=group)
        part /= dist.get_world_size(group)


def grid(*names: str) -> Any:
    """Give a mesh of four ranks, two by two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


class Zero(Layout):
    """DDP with an optimizer whose state is sharded."""

    size = 2

    def build(self) -> None:
        self.share = (dist.get_rank(), dist.get_world_size())
        self.model = DistributedDataParallel(Net())

    def optimizer(self) -> Any:
        return ZeroRedundancyOptimizer(self.params(), torch.optim.SGD, lr=0.1)


class TwoMeshes(Layout):
    """A layer sharded over four ranks, one over two of two copies, the rest plain."""

    size = 4

    def build(self) -> None:
        self.share = (dist.get_rank(), 4)
        self.model = Net()
        fully_shard(self.model.up, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(self.model.down, mesh=grid("replica", "shard"))

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        average(list(self.model.norm.parameters()))


class PartialGrads(Layout):
    """Gradients of which each rank holds a summand."""

    size = 2

    def build(self) -> None:
        self.net, self.mesh = Net(), init_device_mesh("cpu", (2,))
        whole = [Replicate()]
        self.held = [
            nn.Parameter(distribute_tensor(p.detach(), self.mesh, whole))
            for p in self.net.parameters()
        ]

    def params(self) -> list[Any]:
        return self.held

    def backward(self, scaler: Any, step: int) -> None:
        x, y = (part.chunk(2)[dist.get_rank()] for part in batch(step))
        self.net.zero_grad()
        scaler.scale(mse(self.net(x), y)).backward()
        for param, plain in zip(self.held, self.net.parameters(), strict=True):
            param.grad = DTensor.from_local(plain.grad / 2, self.mesh, [Partial()])


class Staged(Layout):
    """Two stages of two ranks each; a rank's gradients are averaged with its copy's."""

    size = 4

    def build(self) -> None:
        mesh = grid("stage", "copy")
        self.mine, self.copies = mesh["stage"].get_local_rank(), mesh["copy"]
        self.share = (self.copies.get_local_rank(), 2)
        net = Net().requires_grad_(False)
        parts = [nn.Sequential(net.norm, net.up, nn.Tanh()), net.down]
        parts[self.mine] = self.wrapped(parts[self.mine].requires_grad_(True))
        self.stage, self.model = parts[self.mine], nn.Sequential(*parts)
        self.options = {"norm_group": mesh["stage"].get_group()}

    def params(self) -> list[Any]:
        return list(self.stage.parameters())

    def wrapped(self, stage: nn.Module) -> Any:
        return DistributedDataParallel(stage, process_group=self.copies.get_group())


class StagedFsdp2(Staged):
    """Each stage is sharded."""

    def wrapped(self, stage: nn.Module) -> Any:
        for layer in stage.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.copies)
        return fully_shard(stage, mesh=self.copies)


class StagedFsdp1(Staged):
    """Each stage is sharded, the old way."""

    def build(self) -> None:
        super().build()
        self.options |= {"model": self.stage}

    def wrapped(self, stage: nn.Module) -> Any:
        group = self.copies.get_group()
        return FullyShardedDataParallel(stage, process_group=group, device_id=CPU)


class FourStages(Layout):
    """Four stages, one on each rank."""

    size = 4

    def build(self) -> None:
        self.model = self.whole()
        self.options = {"norm_group": dist.group.WORLD}

    @staticmethod
    def whole() -> nn.Module:
        torch.manual_seed(0)
        sizes = [8, 6, 5, 7, 4]
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        return nn.Sequential(*layers)

    def params(self) -> list[Any]:
        return list(self.model[dist.get_rank()].parameters())


class Subset(FourStages):
    """Each rank's optimizer holds some of the parameters."""

    whole = Net

    def params(self) -> list[Any]:
        return list(self.model.parameters())[dist.get_rank() :: 4]


class Routed(Layout):
    """A layer that all ranks hold, and an expert of each."""

    size = 2
    whole = Experts

    def build(self) -> None:
        whole, self.share = Experts(), (dist.get_rank(), 2)
        self.shared, self.expert = whole.shared, whole.experts[dist.get_rank()]
        self.model = lambda x: self.expert(torch.tanh(self.shared(x)))
        mine = {*self.expert.parameters()}
        self.options = {"norm_group": lambda p: dist.group.WORLD if p in mine else None}

    def params(self) -> list[Any]:
        return [*self.shared.parameters(), *self.expert.parameters()]

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        average(list(self.shared.parameters()))
        for param in self.expert.parameters():
            param.grad *= 0.5


class Fsdp1(Layout):
    """Every strategy of FullyShardedDataParallel, units within units."""

    size = 4
    original = False
    strategy = ShardingStrategy.FULL_SHARD

    def build(self) -> None:
        self.share = (dist.get_rank(), 4)
        how: dict[str, Any] = {
            "use_orig_params": self.original,
            "sharding_strategy": self.strategy,
            "device_id": CPU,
        }
        if "HYBRID" in self.strategy.name:
            mesh = grid("replica", "shard")
            how["process_group"] = tuple(reversed(mesh.get_all_groups()))
        net = Net()
        net.up = FullyShardedDataParallel(net.up, **how)
        self.model = FullyShardedDataParallel(net, **how)
        self.options = {"model": self.model}


def fsdp1(kind: str, original: bool) -> type[Layout]:
    """Give the layout of a strategy."""
    strategy = ShardingStrategy[kind]
    return type("Fsdp1Kind", (Fsdp1,), {"strategy": strategy, "original": original})


class Unshared(Layout):
    """Different data on each rank, and gradients that nothing averages."""

    size = 2

    def build(self) -> None:
        super().build()
        self.share = (dist.get_rank(), dist.get_world_size())


class Averaged(Unshared):
    """The same, averaged by hand: what DDP does."""

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        average(self.params())


class Unequal(Averaged):
    """Weights that differ between ranks; the gradients are averaged all the same."""

    def reset(self, scaler: Any) -> None:
        super().reset(scaler)
        with torch.no_grad():
            for param in self.params():
                param.mul_(1.0 + 0.5 * dist.get_rank())

    def backward(self, scaler: Any, step: int) -> None:
        whole = Net()
        x, y = (part.chunk(2)[dist.get_rank()] for part in batch(step))
        scaler.scale(mse(whole(x), y)).backward()
        pairs = zip(self.params(), whole.parameters(), strict=True)
        for param, plain in pairs:  # those of equal weights, so that one norm is right
            param.grad = plain.grad
        average(self.params())


class TpOfCopies(Layout):
    """Tensor parallel in two copies; only ranks of the copies agree on a scale."""

    size = 4

    def build(self) -> None:
        mesh = grid("copy", "tensor")
        self.share = (mesh["copy"].get_local_rank(), 2)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.model = parallelize_module(Net(), mesh["tensor"], plan)
        self.group = mesh["copy"].get_group()
        self.options = {"process_group": self.group}

    def backward(self, scaler: Any, step: int) -> None:
        super().backward(scaler, step)
        average(self.params(), self.group)


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
PLAIN = {
    "zero": Zero,
    "two meshes": TwoMeshes,
    "partial": PartialGrads,
    "averaged by hand": Averaged,
    "unequal weights": Unequal,
    "tp of copies": TpOfCopies,
    **{f"fsdp1 {kind}": fsdp1(kind, original=False) for kind in STRATEGIES},
}
# Refused unless the scaler is told more.
STAGES = {
    "fsdp2 x stages": StagedFsdp2,
    "ddp x stages": Staged,
    "four stages": FourStages,
    "subset": Subset,
    "routed": Routed,
}
UNITS = {
    "fsdp1 HYBRID_SHARD": fsdp1("HYBRID_SHARD", original=False),
    "fsdp1 _HYBRID_SHARD_ZERO2": fsdp1("_HYBRID_SHARD_ZERO2", original=False),
    "fsdp1 x stages": StagedFsdp1,
    **{
        f"fsdp1 {kind}, original": fsdp1(kind, original=True)
        for kind in [*STRATEGIES, "HYBRID_SHARD"]
    },
}
ALL: dict[str, Any] = {**PLAIN, **STAGES, **UNITS, "unshared": Unshared}
_BUILT: dict[str, Layout] = {}


def placed(name: str) -> Layout:
    """Build a layout, once per process."""
    if name not in _BUILT:
        _BUILT[name] = ALL[name]()
    return _BUILT[name]


def norm_in(
    name: str,
    order: float = 2.0,
    told: bool = True,
    by_hand: bool = False,
    hidden: bool = False,
    without: tuple[str, ...] = (),
    bad: float | None = None,
) -> float:
    """Take the norm of one step's gradients; one rank's may hold an inf or NaN."""
    layout = placed(name)
    given = layout.options if told or name == "tp of copies" else {}
    given = {key: value for key, value in given.items() if key not in without}
    scaler = GradScaler("cpu", 64.0, **given)
    seen = backend.in_host_memory
    if hidden:
        backend.in_host_memory = lambda tensor: False
    try:
        layout.reset(scaler)
        make = getattr(layout, "optimizer", None)
        optimizer = make() if make else OPTIMIZERS["sgd"](layout.params())
        optimizer.zero_grad()
        layout.backward(scaler, 0)
        if bad is not None and dist.get_rank() == dist.get_world_size() - 1:
            layout.params()[0].grad.mul_(bad)
        if by_hand:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 1e30, order).item()
        scaler.step(optimizer)
        scaler.update()
        return norm if scaler.last_step.applied else math.inf
    finally:
        backend.in_host_memory = seen


def norm_of_one_group(name: str) -> float:
    """Take the norm with one group for all parameters, though some are replicas."""
    layout = placed(name)
    scaler = GradScaler("cpu", 64.0, norm_group=dist.group.WORLD)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    return scaler.clip_grad_norm_(optimizer, 1e30).item()


def collectives(name: str) -> dict[str, int]:
    """Count what is sent to clip and step."""
    layout = placed(name)
    scaler = GradScaler("cpu", 64.0, **layout.options)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    for step in range(2):  # the first makes the scaler's own group
        optimizer.zero_grad()
        layout.backward(scaler, 0)
        profile = torch.profiler.profile() if step else nullcontext()
        with profile:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    names = [e.name for e in profile.events() if e.name.startswith("gloo:")]
    return {name: names.count(name) for name in names}


def unread(name: str) -> list[float]:
    """Take norms during which no value may be read on the host."""
    from no_host_reads import no_host_reads

    layout, found = placed(name), []
    scaler = GradScaler("cpu", 64.0, **layout.options)
    layout.reset(scaler)
    optimizer = torch.optim.SGD(layout.params(), lr=0.0)
    for step in range(3):
        optimizer.zero_grad()
        layout.backward(scaler, 0)
        with no_host_reads() if step else nullcontext():
            norm = scaler.clip_grad_norm_(optimizer, 1e9)
        found.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
    return found


def refused_then_steps(name: str) -> Any:
    """Ask for a norm that cannot be known; then step without it."""
    layout = placed(name)
    scaler = GradScaler("cpu", 64.0)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    try:
        scaler.clip_grad_norm_(optimizer, 1.0)
    except ValueError as error:
        scaler.step(optimizer)
        scaler.update()
        return str(error), scaler.last_step.applied
    return "nothing happened"


def differing_held() -> Any:
    """Clip what nothing averaged; give what the error says that each rank holds."""
    layout = placed("unshared")
    scaler = GradScaler("cpu", 64.0)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    flat = torch.cat([p.grad.flatten() for p in layout.params()])
    try:
        scaler.clip_grad_norm_(optimizer, 1.0)
    except RankMismatchError as error:
        return error.held, (flat.norm().item() / 64.0, flat.numel())
    return None


def drifted() -> Any:
    """Sum gradients up in each rank's own order, and clip first at step 31."""
    rank, net = dist.get_rank(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0)
    for step in range(32):
        optimizer.zero_grad()
        x, y = batch(step)
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        grads = []
        for part, target in parts:
            net.zero_grad()
            scaler.scale(mse(net(part), target)).backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        order = [(rank + place) % 4 for place in range(4)]
        for index, param in enumerate(net.parameters()):
            param.grad = sum(grads[place][index] for place in order) / 4
        if step == 31:
            flat = torch.cat([p.grad.flatten() for p in net.parameters()])
            norm = scaler.clip_grad_norm_(optimizer, 1e9).item()
            weights = torch.cat([p.detach().flatten() for p in net.parameters()])
            return norm, flat.norm().item() / 64.0, weights
        scaler.step(optimizer)
        scaler.update()
    return None


def apart_on_a_device(kind: str) -> Any:
    """Clip what differs where nobody reads; count steps until the error arrives."""
    seen = backend.in_host_memory
    backend.in_host_memory = lambda tensor: False
    try:
        layout = placed("unshared")
        scaler = GradScaler("cpu", 64.0, sync="never")
        layout.reset(scaler)
        optimizer = OPTIMIZERS[kind](layout.params())
        before = [p.detach().clone() for p in layout.params()]
        for step in range(64):
            optimizer.zero_grad()
            layout.backward(scaler, step)
            try:
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
            except RankMismatchError as error:
                same = zip(before, layout.params(), strict=True)
                return step, str(error), all(torch.equal(a, b) for a, b in same)
        return None
    finally:
        backend.in_host_memory = seen


def grouped_on_some() -> str:
    """Pass a `norm_group` on one rank only."""
    layout = placed("averaged by hand")
    group = dist.group.WORLD if dist.get_rank() else None
    scaler = GradScaler("cpu", 64.0, norm_group=group)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    try:
        scaler.clip_grad_norm_(optimizer, 1.0)
    except RankMismatchError as error:
        return str(error)
    return "nothing happened"


def two_norm_types(first: float, second: float) -> str:
    """Clip by another order on one rank."""
    layout = placed("averaged by hand")
    scaler = GradScaler("cpu", 64.0)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    try:
        scaler.clip_grad_norm_(optimizer, 1.0, (first, second)[dist.get_rank()])
    except RankMismatchError as error:
        return str(error)
    return "nothing happened"


def nothing_on_one(what: str) -> list[float]:
    """Take norms although rank 1 has no parameters, or no gradients."""
    net = Net()
    held = [] if what == "parameters" and dist.get_rank() == 1 else net.parameters()
    optimizer = torch.optim.SGD([{"params": list(held)}], lr=0.0)
    scaler, found = GradScaler("cpu", 64.0), []
    for order in (1.0, 2.0, math.inf):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            x, y = batch(0)
            scaler.scale(mse(net(x), y)).backward()
        found.append(scaler.clip_grad_norm_(optimizer, 1e9, order).item())
        scaler.step(optimizer)
        scaler.update()
    return found


def joined() -> str:
    """Name a scaler to `Join`."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(Net())
    try:
        Join([model, GradScaler("cpu")])
    except ValueError as error:
        return str(error)
    return "nothing happened"
