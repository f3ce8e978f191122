"""A classifier in the style of apex's ImageNet example."""

import argparse

import torch
from apex import amp


def parse(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--save", default=None)
    parser.add_argument("--spoil", type=int, nargs="*", default=[])
    return parser.parse_args(arguments)


def data(step):
    source = torch.Generator().manual_seed(step % 10)
    target = torch.randint(0, 3, (16,), generator=source)
    inputs = torch.randn(16, 12, generator=source)
    inputs[torch.arange(16), target] += 2.0
    return inputs, target


def main(arguments=None):
    args = parse(arguments)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 3),
    )
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=0,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.5)
    first = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])
        first = checkpoint["step"]

    losses = []
    for step in range(first, args.steps):
        optimizer.zero_grad()
        for part in range(args.accumulate):
            inputs, target = data(step * args.accumulate + part)
            output = model(inputs)
            loss = criterion(output, target) / args.accumulate
            if step in args.spoil:
                loss = loss * float("inf")
            last = part + 1 == args.accumulate
            with amp.scale_loss(
                loss, optimizer, delay_unscale=args.delay and not last
            ) as scaled_loss:
                scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item() * args.accumulate)
    if args.save:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "amp": amp.state_dict(),
            "step": args.steps,
        }
        torch.save(checkpoint, args.save)
    return model, optimizer, losses


if __name__ == "__main__":
    main()
