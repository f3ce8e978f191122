"""Makes a scaler by every spelling there is, and says what it got."""

import copy
import pickle
import warnings

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import GradScaler as FromItsHome
from torch.cpu.amp import GradScaler as OfCpu
from torch.cuda.amp import GradScaler as OfCuda
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    made = [
        GradScaler("cpu", 2.0**8, 4.0),
        FromItsHome(device="cpu", init_scale=2.0**8, growth_factor=4.0),
        torch.amp.GradScaler("cpu", 2.0**8, growth_factor=4.0),
        OfCpu(2.0**8, 4.0),
        torch.cpu.amp.GradScaler(init_scale=2.0**8, growth_factor=4.0),
        ShardedGradScaler("cpu", 2.0**8, 0.5, 4.0),
    ]
    off = [OfCuda(enabled=False), torch.cuda.amp.GradScaler(2.0**8, enabled=False)]
deprecated = sum(issubclass(w.category, FutureWarning) for w in told)
ours = all(hasattr(scaler, "last_step") for scaler in [*made, *off])
same = all(isinstance(scaler, torch.amp.GradScaler) for scaler in [*made, *off])
settings = {
    (s.get_scale(), s.get_growth_factor(), s.get_backoff_factor()) for s in made
}
copied = (
    pickle.loads(pickle.dumps(made[0])).get_scale(),
    copy.deepcopy(made[3]).get_scale(),
)
print(ours, same, deprecated, settings, copied)
