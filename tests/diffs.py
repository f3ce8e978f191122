"""What stands before each `diff` of the documents, so that both of its sides run.

A page shows only what changes.  `SETUP` maps a page to the code before each of its
diffs, in order.
"""

NET = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loss_fn = torch.nn.functional.mse_loss
data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(2)]
"""
GLOO = (
    NET
    + """
import os
import torch.distributed as dist
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.is_initialized() or dist.init_process_group("gloo", rank=0, world_size=1)
group = dist.group.WORLD
"""
)
KERAS = """
import buoy.keras
import keras
model = keras.Sequential([keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()
keras.config.set_dtype_policy("mixed_float16")
"""
TENSORFLOW = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.keras is tf_keras
import tensorflow as tf
import tf_keras
import buoy.tensorflow
weight = tf.Variable([1.0])
variables = [weight]
optimizer = tf_keras.optimizers.SGD(0.1)
compute_loss = lambda: tf.reduce_sum(weight**2)
"""
FLAX = """
import functools
import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState
model = linen.Dense(1, dtype=jnp.float16)
x = jnp.ones((4, 3))
loss_fn = lambda params: jnp.mean(model.apply(params, x).astype("float32") ** 2)
params = model.init(jax.random.key(0), x)
class State(TrainState):
    dynamic_scale: object = None
"""
JMP = """
import jax
import jax.numpy as jnp
import jmp
import optax
import buoy.jax
params, x = jnp.ones(3), jnp.ones((4, 3))
compute_loss = lambda params, x: jnp.mean((x @ params) ** 2)
"""
LIGHTNING = "from lightning.pytorch import Trainer"
TRANSFORMERS = """
import torch
import buoy.integrations.transformers
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}
model = Model()
dataset = [{"x": torch.randn(8), "labels": torch.randn(())} for _ in range(32)]
arguments = TrainingArguments(
    "out", fp16=True, use_cpu=True, max_steps=2, save_strategy="no", report_to=[]
)
"""

SETUP = {
    "README.md": [NET],
    "docs/index.md": [NET],
    "docs/migrate/accelerate.md": [NET],
    "docs/migrate/apex.md": [NET],
    "docs/migrate/flax.md": [FLAX],
    "docs/migrate/jmp.md": [JMP],
    "docs/migrate/keras.md": [KERAS, KERAS],
    "docs/migrate/lightning.md": [LIGHTNING],
    "docs/migrate/sharded-grad-scaler.md": [GLOO],
    "docs/migrate/tensorflow.md": [TENSORFLOW],
    "docs/migrate/torch.md": [NET, "from buoy.torch import GradScaler" + NET],
    "docs/migrate/transformers.md": [TRANSFORMERS],
}
ELSEWHERE = {  # needs more than a few lines: the test that runs the same calls
    "docs/migrate/megatron-deepspeed-fairseq.md": "tests/integrations/zero.py",
    "docs/migrate/recipes.md": "tests/integrations/recipes.py",
}
