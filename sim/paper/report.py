"""docs/paper.md: the paper's figures 9 to 14 and tables 5 to 8 beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sim.paper.engine import good_engine, simulated_jct
from sim.paper.fit import errors, fits
from sim.paper.losses import accuracy
from sim.paper.model import Parameters, Setup, parts_of, reductions, setup_of, transfer_share
from sim.paper.numbers import FITTED, HELD_OUT, METHODS, Numbers, numbers
from sim.paper.tables import SHORT, memory, partitions, span, table
from sim.spec import Codec

REQUESTS, SEED = 4_000, 1


def report(measured: Path) -> Iterator[str]:
    """The lines of docs/paper.md. `measured` is the folder with the files of `hackkv eval`."""
    paper, found = numbers(), fits()
    yield from _head(paper, found.all_cases, found.held_out)
    yield from _reductions(paper, found.all_cases, found.held_out)
    yield from _decomposition(paper, found.all_cases)
    yield from _simulated(paper, found.all_cases)
    yield from _scaling(paper, found.all_cases, found.held_out)
    yield from memory(paper)
    yield from accuracy(paper, measured)
    yield from partitions(paper)
    yield from _good(paper)
    yield from Path(__file__).with_name("contradictions.md").read_text(encoding="utf-8").splitlines()


def _head(paper: Numbers, described: Parameters, held: Parameters) -> Iterator[str]:
    mean = np.abs(errors(described, paper.cases)).mean()
    worst = np.abs(errors(held, HELD_OUT)).max()
    yield "# The paper's evaluation beside ours"
    yield ""
    yield "Written by `python -m sim.paper --out docs`; the parameters come from `python -m sim.paper fit`."
    yield ""
    yield (
        "HACK was measured on GPUs that this project does not have, so its job completion times (JCT) are "
        "repeated by formulas (`sim/paper/model.py`) and in the simulator. Ten parameters of a serving engine "
        "are fitted in two ways. *All cases* describes the paper: the mean error of its 36 reductions is "
        f"**{mean:.1f} points**. *Held out* is fitted to {', '.join(FITTED)} alone and predicts "
        f"{', '.join(HELD_OUT)}: its largest error there is **{worst:.1f} points**. The parameters describe the "
        "authors' prototype, which is a slow engine; what a good one gives is below. A fit with ten parameters "
        "shows that the paper's numbers are possible, not why they are so."
    )
    yield ""
    rows = [(name, *(f"{getattr(p, name):.3g}" for p in (described, held))) for name in Parameters.model_fields]
    yield from table(("parameter", "all cases", "held out"), rows)


def _reductions(paper: Numbers, described: Parameters, held: Parameters) -> Iterator[str]:
    yield "## Figures 9, 11, 12: JCT that HACK saves, percent"
    yield ""
    yield "Against FP16 baseline / CacheGen / KVQuant. *Italic*: a prediction, since the fit has not seen the case."
    yield ""
    rows = []
    for name, case in paper.cases.items():
        at = setup_of(case)
        other = _triple(reductions(at, held))
        rows.append(
            (
                case.figure,
                name,
                _triple(case.reductions),
                _triple(reductions(at, described)),
                other if name in FITTED else f"*{other}*",
            )
        )
    yield from table(("Fig.", "case", "paper", "all cases", "held out"), rows)
    for words, p, names in (
        ("all cases, all 36", described, tuple(paper.cases)),
        ("held out, seen", held, FITTED),
        (f"held out, {', '.join(HELD_OUT)}", held, HELD_OUT),
    ):
        off = np.abs(errors(p, names))
        yield f"- {words}: mean error {off.mean():.1f} points, largest {off.max():.1f}."
    yield ""
    yield (
        "Short prompts (IMDb, HumanEval) and Falcon cannot be met together with the rest: their KV is too small "
        "to cost what the paper reports (contradictions 3 and 4)."
    )
    yield ""


def _triple(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def _decomposition(paper: Numbers, p: Parameters) -> Iterator[str]:
    yield "## Figure 10: where the time goes"
    yield ""
    parts = ("prefill", "quantize", "wait", "transfer", "decode", "dequantize / approximate")
    yield from table(("data set", "method", *parts, "JCT, s"), _parts(paper, p))
    pairs = (f"{stage}: paper" for stage in ("prefill", "decode", "transfer", "approximation, share"))
    yield from table(("HACK saves, %", *(cell for told in pairs for cell in (told, "ours"))), _cuts(paper, p))
    yield "Transfer's share of the baseline's JCT (Fig. 1a), percent:"
    yield ""
    gpus = {"A10G": "Cocktail", "T4": "T4", "L4": "L4", "V100": "V100", "A100": "A100"}
    yield from table(
        ("GPU", "paper", "ours"),
        (
            (gpu, paper.transfer_share[gpu], f"{transfer_share(setup_of(paper.cases[name]), p):.1f}")
            for gpu, name in gpus.items()
        ),
    )


def _parts(paper: Numbers, p: Parameters) -> Iterator[Sequence[object]]:
    """Seconds of every method on every data set."""
    for name in SHORT:
        at = setup_of(paper.cases[name])
        for method in METHODS:
            parts = parts_of(at, method, p)
            cells = (parts.prefill, parts.quantize, parts.wait, parts.transfer, parts.decode, parts.approximate)
            yield name, method, *(f"{each:.2f}" for each in cells), f"{parts.jct:.1f}"


def _cuts(paper: Numbers, p: Parameters) -> Iterator[Sequence[object]]:
    """The share that HACK saves of each stage: the paper's number, then ours."""
    told = paper.fig10
    for name in SHORT:
        at = setup_of(paper.cases[name])
        base, cachegen, hack = (parts_of(at, method, p) for method in ("baseline", "CacheGen", "HACK"))
        ours = (
            (told.prefill_cut[name], 1 - (hack.prefill + hack.quantize) / base.prefill),
            (told.decode_cut[name], 1 - hack.decode / cachegen.decode),
            (told.transfer_cut, 1 - hack.transfer / base.transfer),
            (told.approximation, hack.approximate / hack.jct),
        )
        yield name, *(cell for paper_s, share in ours for cell in (span(paper_s), f"{100 * share:.1f}"))


def _simulated(paper: Numbers, p: Parameters) -> Iterator[str]:
    yield "## The same in the simulator"
    yield ""
    yield (
        f"{REQUESTS:,} requests with the router's and schedulers' own decisions, Poisson arrivals at the "
        "formulas' rate; a prefill replica is busy while it sends. Formulas know queues only by their first two "
        "moments."
    )
    yield ""
    rows = []
    for name in ("Cocktail", "arXiv", "V100"):
        case = paper.cases[name]
        at = setup_of(case)
        for method in METHODS:
            formula = parts_of(at, method, p).jct
            jct = simulated_jct(case, at, method, p, REQUESTS, SEED)
            rows.append((name, method, f"{formula:.1f}", f"{jct:.1f}", f"{100 * (jct / formula - 1):+.1f}%"))
    yield from table(("case", "method", "formula, s", "simulated, s", "difference"), rows)


def _scaling(paper: Numbers, described: Parameters, held: Parameters) -> Iterator[str]:
    at = setup_of(paper.cases["Cocktail"])
    yield "## Figure 14: 1 to 8 prefill replicas for each decode replica"
    yield ""
    yield (
        "The paper's numbers are 1 + 7 c, where c is the transfer's share of JCT at one prefill replica: the "
        "receiver serves its senders one after another, so that a transfer takes eight times as long at p = 8. "
        "The text has the two ends only, so only p = 8 can be compared. Here c is predicted by the held-out fit, "
        "without its queue."
    )
    yield ""
    rows, misses = [], []
    for method in METHODS:
        share, other = (share_alone(at, method, p) for p in (held, described))
        low, high = (paper.fig14.baseline,) * 2 if method == "baseline" else paper.fig14.others
        own = paper.transfer_range if method == "baseline" else paper.fig10.transfer_left
        told = f"{low:g}" if low == high else span((low, high))
        near = min(max(700 * share, low), high)
        off = (100 + 700 * share) / (100 + near) - 1
        misses.append(f"{method} {700 * share - near:+.0f}")
        rows.append(
            (
                *(method, told, f"{700 * share:.0f}", f"{100 * share:.1f}", f"{100 * off:+.1f}%", f"{700 * other:.0f}"),
                f"{7 * own[0]:.0f}-{7 * own[1]:.0f}",
            )
        )
    head = ("method", "JCT at p = 8, % more: paper", "7 c", "c, %", "JCT beside the paper's", "7 c, all cases")
    yield from table((*head, "7 c, c as the paper prints it"), rows)
    yield (
        f"JCT at p = 8 stays within a tenth of the paper's, but points of growth are missed: {', '.join(misses)}. We "
        "found no constant behind that. The two fits differ in what sets their load. The held-out fit takes the rate "
        "of Fig. 1d (0.18 requests/s), the other the transfer shares of Fig. 1a, and FP16 in the paper lies between. "
        "The last column is the paper's own c: Fig. 1a's 19.1 to 23.5% for FP16, Fig. 10's 1.31 to 5.4% for the "
        "others. To come within 8 points of FP16's 127, c has to be 17.0 to 19.3%, which of Fig. 1a's range is the "
        "lowest end. Nothing was changed to come nearer, since this figure is held out."
    )
    yield ""


def share_alone(at: Setup, method: str, p: Parameters) -> float:
    """The transfer's share of JCT where nobody waits."""
    parts = parts_of(at, method, p)
    return parts.transfer / (parts.jct - parts.wait)


GOOD = ("Cocktail", "T4", "L4", "V100", "A100", "Mistral-7B", "arXiv", "IMDb", "HumanEval")


def _good(paper: Numbers) -> Iterator[str]:
    yield "## What a good engine gives on the same hardware"
    yield ""
    yield (
        "The roofline with the simulator's defaults: half of the rated FLOP/s, 80% of the memory's rate, 85% of "
        "the network's, attention that shares KV over a group of heads, no queue. JCT that 2-bit codes save, at "
        "batch 2 and 16 on the decode replica, and FP16's seconds at batch 16."
    )
    yield ""
    rows = []
    for name in GOOD:
        at = setup_of(paper.cases[name])
        cells = []
        for other in ("fp16", "fp8"):
            saved = [
                100 * (1 - sum(good_engine(at, HACK, batch)) / sum(good_engine(at, Codec(name=other), batch)))
                for batch in (2, 16)
            ]
            cells.append(" / ".join(f"{value:.0f}%" for value in saved))
        seconds = good_engine(at, Codec(name="fp16"), 16)
        rows.append((name, *cells, " + ".join(f"{value:.2f}" for value in seconds)))
    yield from table(("case", "beside FP16", "beside FP8", "FP16: prefill + transfer + decode, s"), rows)
    yield (
        "Transfers that overlap with the prompt vanish where they are shorter than it. What is left are decode's "
        "traffic, room for about six times as many requests, and queues: goodput and cost at an objective "
        "(`hackkv plan`, [docs/plan.md](plan.md)), not JCT at idle."
    )
    yield ""


HACK = Codec(name="hack")
