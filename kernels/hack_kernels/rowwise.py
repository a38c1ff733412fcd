"""A model's operations on rows, and the write of a decoded row to its slot, in torch.

A backend inherits `Rowwise` and overrides operations that it computes in fewer passes. In C++ each is one call. The
float32 forms are chosen so that a row does not depend on the rows beside it (`hackkv.model.llama` has the
measurement).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.block_weight import BlockWeight, Matrices, Norms, Weight, rounded_rows
from hack_kernels.choosing import ChoiceInput, ChoiceRules, Chooser, ChosenIds, NumpyChooser, Scores, choose, score
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.page_selection import PageSelecting
from hack_kernels.recorder import Recorder
from hack_kernels.voting import Voting


class Rowwise(Voting, PageSelecting):
    """Implements `RowKernels` on any device; `RowKernels` describes the arguments."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Float32 is summed in float64, because torch's order of a float32 sum depends on the number of rows and
        threads, and changes the result."""
        if isinstance(weight, BlockWeight):
            wide = None if bias is None else bias.float()
            return self.product(rounded_rows(x, weight.bits), weight.unpacked(), wide).to(x.dtype)
        if x.dtype != torch.float32:
            return F.linear(x, weight, bias)
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()

    def finish_layer(self, x: Tensor, mixed: Tensor, matrices: Matrices, norms: Norms, epsilon: float) -> Tensor:
        """Operation by operation."""
        out, gate_up, down = matrices
        normed = self.norm(x, norms[0], epsilon, self.product(mixed, out))
        return self.norm(x, norms[1], epsilon, self.product(self.gate(self.product(normed, gate_up)), down))

    def recorder(self) -> Recorder | None:
        """None: torch's operators take the time, so a recorder would gain nothing."""
        return None

    def take(self, table: Tensor, ids: Tensor) -> Tensor:
        """torch's operator."""
        return table.index_select(0, ids)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """torch's operator."""
        return x.to(dtype)

    def unpack(self, weight: BlockWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """The numbers of the definition."""
        return weight.unpacked(dtype, ids)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """RMSNorm."""
        if more is not None:
            x.add_(more)
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)

    def rotate(self, x: Tensor, heads: int, cos_sin: Tensor) -> None:
        """Rotary embedding. Products and sums are separate operations: a fused multiply-add may round differently at
        the edges of vectors."""
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        low, high = x[:, :heads].float().chunk(2, dim=-1)
        x[:, :heads].copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))

    def lay_out(self, matrices: Tensor) -> Tensor:
        """Row-major."""
        return matrices.contiguous()

    def rotate_heads(
        self, x: Tensor, matrices: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Summed in float64, for the reason that `product` gives."""
        rows, heads, dim = x.shape
        groups = matrices.shape[0]
        grouped = x.double().view(rows, groups, heads // groups, dim).transpose(0, 1)  # [G, T, H/G, D]
        rotated = grouped.flatten(1, 2) @ matrices.double().mT
        if shift is not None:
            rotated += shift.double()[:, None]
        return (
            rotated.view(groups, rows, heads // groups, dim)
            .transpose(0, 1)
            .flatten(1, 2)
            .float()
            .to(dtype)
            .contiguous()
        )

    def rotate_rows(self, q: Tensor, k: Tensor, v: Tensor, rotations: HeadRotations) -> tuple[Tensor, Tensor, Tensor]:
        """One call of `rotate_heads` for each tensor that is rotated."""
        k, v = (x.to(torch.float16).float() for x in (k, v))
        v = v if rotations.value is None else self.rotate_heads(v, rotations.value)
        return self.rotate_heads(q.float(), rotations.query), self.rotate_heads(k, rotations.key, rotations.shift), v

    def gate(self, x: Tensor) -> Tensor:
        """SwiGLU. torch's float32 silu differs where threads split a tensor off a vector boundary; a form with exp
        does not."""
        g, u = x.chunk(2, dim=-1)
        active = g / torch.exp(-g).add_(1) if x.dtype == torch.float32 else F.silu(g)
        return active.mul_(u)

    def new_chooser(self, rules: ChoiceRules, prompt_ids: Sequence[int]) -> Chooser:
        """A chooser in host memory."""
        return NumpyChooser(rules, prompt_ids)

    def choose(self, given: ChoiceInput) -> list[int]:
        """In numpy, on the host."""
        return choose(given)

    def choosing(self, given: ChoiceInput, *, later: bool = False) -> ChosenIds:
        """The ids of `choose`, which waits. No device works behind the host, so no caller asks for a later choice."""
        assert not later
        found = self.choose(given)
        return ChosenIds(torch.tensor(found, device=given.logits.device), lambda: found)

    def score(self, logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[Scores]:
        """In numpy, on the host."""
        return score(logits, ids, tops)

    def set_in(self, flags: Tensor) -> list[int]:
        """Indices of the set flags."""
        return flags.nonzero().flatten().tolist()

    def append(self, pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> None:
        """Write a decoded row of each sequence into its slot; a faulty row leaves the slot unchanged."""
        k, v = k.to(torch.float16), v.to(torch.float16)
        bad = ~(torch.isfinite(k) & torch.isfinite(v)).flatten(1).all(dim=1)
        faulty.logical_or_(bad)
        at, kept = pool.window.at(spans.starts, pool.page_tokens), bad[:, None, None]
        for open_rows, x in ((pool.open_k, k), (pool.open_v, v)):
            open_rows[spans.slots, :, at] = open_rows[spans.slots, :, at].where(kept, x)

    def narrow(self, k: Tensor, v: Tensor, spans: Spans, faulty: Tensor) -> tuple[Tensor, Tensor]:
        """Faulty rows are counted by sequence. The host knows the number of sequences, so it does not wait."""
        k, v = (x.to(torch.float16).contiguous() for x in (k, v))
        bad = ~(torch.isfinite(k) & torch.isfinite(v)).flatten(1).all(dim=1)
        of_row = torch.searchsorted(spans.offsets, torch.arange(len(bad), device=k.device), right=True) - 1
        faulty.logical_or_(torch.zeros_like(spans.offsets).index_add_(0, of_row, bad.long()) > 0)
        return k.masked_fill(bad[:, None, None], 0), v.masked_fill(bad[:, None, None], 0)
