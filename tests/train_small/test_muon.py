"""Our batched Muon takes the same steps as torch.optim.Muon."""

import torch

from tools.train_small.muon import Muon, orthogonal

SHAPES = ((96, 32), (32, 96), (64, 32), (32, 32), (32, 64))


def test_the_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(s)) for s in SHAPES]
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, momentum=0.95)
    batched = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.01)
    for _ in range(3):
        for p, q in zip(theirs, ours, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        reference.step()
        batched.step()
    for p, q in zip(theirs, ours, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-2, atol=1e-3)


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 32, 96)))
    assert float(values.min()) > 0.4
    assert float(values.max()) < 1.6
