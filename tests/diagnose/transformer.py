"""A transformer of twelve blocks, small enough to be spoilt in every module."""

import torch
from torch import nn

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 11, 5


class Attention(nn.Module):
    """Self-attention with functional softmax between its modules."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        n, t, _ = x.shape
        q, k, v = (
            part.view(n, t, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / (WIDTH / HEADS) ** 0.5
        weights = self.drop((scores + mask).softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).reshape(n, t, WIDTH))


class Block(nn.Module):
    """Attention and a perceptron on a residual stream."""

    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask=mask)
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    """Embedding, blocks, head; a mask of -inf goes through all of it."""

    def __init__(self, blocks=12):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        size = tokens.shape[1]
        mask = torch.full((size, size), float("-inf")).triu(1)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def batch(seed=0):
    """Make tokens."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (2, LENGTH), generator=source)


def loss_of(model, tokens):
    """Predict the next token."""
    logits = model(tokens)
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, WORDS).float(), tokens[:, 1:].reshape(-1)
    )


class _Burst(torch.autograd.Function):
    @staticmethod
    def forward(context, x, where):
        context.where = where
        return x * float("inf") if where == "forward" else x.clone()

    @staticmethod
    def backward(context, grad):
        return grad * float("inf") if context.where == "backward" else grad, None


def spoil(module, direction, *, at_input=False):
    """Let a module's own computation overflow, in one direction; return the undo."""
    original = module.forward

    def forward(*args, **kwargs):
        if at_input:
            return original(_Burst.apply(args[0], direction), *args[1:], **kwargs)
        return _Burst.apply(original(*args, **kwargs), direction)

    module.forward = forward
    return lambda: vars(module).pop("forward")
