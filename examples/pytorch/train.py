# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny log-linear model to recall values by their keys, and shows the loss falling: python3 train.py --device cuda.

A sequence is a list of (key, value) pairs, then some of the keys again in another order; the model must answer each of those
with its value.
"""
import argparse
import sys
import time

import lla_torch as lla
import torch
from torch import nn

KEYS, VALUES = 16, 16


def make_batch(batch, pairs, queries, device, generator):
    """Tokens [batch, 2 pairs + queries]; targets are -100 (ignored) before the queries."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(-1)[:, :pairs]
    values = torch.randint(VALUES, (batch, pairs), generator=generator) + KEYS
    asked = torch.rand(batch, pairs, generator=generator).argsort(-1)[:, :queries]
    tokens = torch.cat([torch.stack([keys, values], -1).flatten(1), keys.gather(1, asked)], 1)
    targets = torch.full_like(tokens, -100)
    targets[:, 2 * pairs:] = values.gather(1, asked)
    return tokens.to(device), targets.to(device)


class Model(nn.Module):
    def __init__(self, block, hidden, layers, levels):
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, hidden)
        nn.init.normal_(self.embedding.weight, std=0.5)
        if block == "mamba2":
            make = lambda: lla.Mamba2(hidden, heads=4, key_dim=32, value_dim=hidden // 2, levels=levels)
        else:
            make = lambda: lla.GatedDeltaNet(hidden, heads=2, key_dim=32, value_dim=hidden // 2, levels=levels)
        self.blocks = nn.ModuleList([make() for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(layers + 1)])
        self.head = nn.Linear(hidden, KEYS + VALUES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.head(self.norms[-1](x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--block", choices=("gdn", "mamba2"), default="gdn")
    parser.add_argument("--linear", action="store_true", help="the linear model, without levels")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-2)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator, queries = torch.Generator().manual_seed(1), options.pairs
    levels = 0 if options.linear else lla.levels_needed(2 * options.pairs + queries)
    model = Model(options.block, options.hidden, 2, levels).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    context = lla.context_of(options.device)
    print(f"{context.query(1)} on {context.query(6)}; {sum(p.numel() for p in model.parameters())} parameters, "
          f"{options.block}, {levels} levels; guessing gives {torch.log(torch.tensor(float(VALUES))):.2f}")
    started, losses = time.perf_counter(), []
    for step in range(options.steps):
        tokens, targets = make_batch(options.batch, options.pairs, queries, options.device, generator)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1, (step + 1) / 20) * (1 - step / options.steps)
        optimizer.step()
        losses.append(loss.detach())
        if step % 20 == 0 or step == options.steps - 1:
            right = (logits.argmax(-1) == targets)[targets >= 0].float().mean().item()
            print(f"step {step:4d}  loss {loss.item():.3f}  right {100 * right:5.1f} %  {time.perf_counter() - started:6.1f} s",
                  flush=True)
    first, last = losses[0].item(), torch.stack(losses[-10:]).mean().item()
    print(f"loss {first:.3f}, then {last:.3f}")
    return 0 if last < 0.8 * first else 1


if __name__ == "__main__":
    sys.exit(main())
