"""Tasks of language: small transformers that predict the next token."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.headroom.tasks import Loss, Task, task


class GPT(nn.Module):
    """Two pre-norm blocks over bytes; small enough for one thread."""

    def __init__(self, vocab: int, width: int, length: int, depth: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        h = self.tok(x) + self.pos(torch.arange(n))
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        for block in self.blocks:
            h = block(h, src_mask=mask)
        return self.head(self.norm(h))


def language(net: GPT, batch: Callable[[], Tensor]) -> Loss:
    """Next-token loss of `net` over batches of token ids."""

    def loss(t: int) -> Tensor:
        x = batch()
        return F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return loss


@task("char_gpt")
def char_gpt() -> Task:
    table = torch.softmax(2.5 * torch.randn(40, 40), 1)  # a bigram "language"

    def batch() -> Tensor:
        x = [torch.randint(40, (8,))]
        for _ in range(32):
            x.append(torch.multinomial(table[x[-1]], 1)[:, 0])
        return torch.stack(x, 1)

    net = GPT(40, 32, 32)
    return [net], language(net, batch), 2e-3, 1200


@task("gpt_copy")
def gpt_copy() -> Task:
    def batch() -> Tensor:
        x = torch.randint(20, (8, 12))
        return torch.cat([x, x], 1)

    net = GPT(20, 32, 24)
    return [net], language(net, batch), 3e-3, 1500


@task("gpt_deep")
def gpt_deep() -> Task:
    table = torch.softmax(4 * torch.randn(64, 64), 1)

    def batch() -> Tensor:
        x = [torch.randint(64, (4,))]
        for _ in range(24):
            x.append(torch.multinomial(table[x[-1]], 1)[:, 0])
        return torch.stack(x, 1)

    net = GPT(64, 48, 24, depth=5)
    return [net], language(net, batch), 1e-3, 1000
