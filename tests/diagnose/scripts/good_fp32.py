"""Nothing mixed at all; gradients cleared by hand."""

import torch

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(8, 1))
optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)
for _ in range(20):
    loss = (torch.randn(16, 8) @ weight).square().mean()
    loss.backward()
    optimizer.step()
    weight.grad.zero_()
