"""One thread for trainings in this process."""

import torch

torch.set_num_threads(1)
