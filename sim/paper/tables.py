"""The paper's tables 5 and 8 and figure 13 beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sim.paper.engine import good_engine
from sim.paper.model import RATIOS, Setup, setup_of
from sim.paper.numbers import Numbers, numbers
from sim.sizes import sizes_of
from sim.spec import Codec, Efficiency

SHORT = ("IMDb", "HumanEval", "arXiv", "Cocktail")
OTHER_MEMORY = 0.06
"""Share of a decode replica's memory that holds neither weights nor KV."""
TABLE5 = (
    ("baseline", "fp16"),
    ("CacheGen", None),
    ("KVQuant", None),
    ("HACK", "hack-paper"),
    ("", "hack"),
    ("", "rot-k3v2"),
    ("", "rot-k4v4"),
    ("", "fp8"),
)
"""The paper's method, and our codec in its place; None if no codec stands for it."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


def span(values: tuple[float, float]) -> str:
    return f"{values[0]:g}-{values[1]:g}"


def memory(paper: Numbers) -> Iterator[str]:
    """Table 5."""
    at = setup_of(paper.cases["Cocktail"])
    total = at.decode_tp * at.decode_gpu.memory_gb * 1e9
    weights, other = at.model.total_weight_bytes, OTHER_MEMORY * total
    yield "## Table 5: peak memory of decode instances, percent"
    yield ""
    yield (
        "Paper / ours. Ours: weights, and pages of `hackkv`'s codecs for as many requests of the data set's mean "
        "length as make FP16 reach the paper's number, in every column; so FP16 is the paper's by definition. "
        f"CacheGen and KVQuant are taken to hold {RATIOS['CacheGen']:.0%} of FP16. {OTHER_MEMORY:.0%} stand for "
        "activations; in the paper, other memory differs by data set (contradiction 5)."
    )
    yield ""
    fp16 = sizes_of(Codec(name="fp16"), at.model.kv_shape).footprint
    setups = {data: setup_of(paper.cases[data]) for data in SHORT}
    tokens = {data: round(each.prompt + each.output) for data, each in setups.items()}
    counts = {
        data: (paper.table5["baseline"][data] / 100 * total - weights - other) / fp16.resting_bytes(tokens[data])
        for data in SHORT
    }

    def percent(data: str, held: float) -> str:
        told = paper.table5.get(method, {}).get(data)
        return f"{told or '-'} / {100 * (weights + other + counts[data] * held) / total:.1f}"

    rows = []
    for method, codec in TABLE5:
        of = None if codec is None else sizes_of(Codec(name=codec), at.model.kv_shape).footprint
        held = {
            data: RATIOS[method] * fp16.resting_bytes(tokens[data]) if of is None else of.resting_bytes(tokens[data])
            for data in SHORT
        }
        rows.append((method or "-", f"`{codec}`" if codec else "-", *(percent(data, held[data]) for data in SHORT)))
    yield from table(("method", "our codec", *SHORT), rows)
    shown = ", ".join(f"{count:.0f} ({data})" for data, count in counts.items())
    yield f"Those are {shown} requests at once on a replica."
    yield ""


def partitions(paper: Numbers) -> Iterator[str]:
    """Table 8 and figure 13."""
    at = setup_of(paper.cases["Cocktail"])
    yield "## Table 8 and Figure 13: partitions, sums, the last block"
    yield ""
    yield (
        "JCT beside partitions of 128, percent more. The paper's numbers are linear in 1/partition "
        "(contradiction 6). Ours are what `hack` pages weigh at rest and on the wire, which is all that a page's "
        "size changes in a good engine."
    )
    yield ""
    base = good_jct("hack", 128)
    rows = []
    for size, told in paper.table8.items():
        ours = 100 * (good_jct("hack", size) / base - 1)
        ratio = sizes_of(Codec(name="hack", settings={"page_tokens": size}), at.model.kv_shape).resting_ratio
        rows.append((size, *(told[data] for data in SHORT), f"{ours:.1f}", f"{ratio:.4f}"))
    head = ("partition", *(f"{data}: paper" for data in SHORT), "Cocktail, good engine", "bytes beside FP16")
    yield from table(head, rows)
    yield from _ablations(paper)


def _ablations(paper: Numbers) -> Iterator[str]:
    yield (
        "Figure 13: JCT without summation elimination (SE: sums of codes are stored with a page) and without "
        "requantization elimination (RQE: the last block stays exact until it is full), percent more. Ours are the "
        "good engine's at batch 16, at least: without SE it adds up the codes of K and V that it reads, one addition "
        "each; without RQE it reads and writes every sequence's last page in each step. `hackkv` has both ablations "
        "(`stored_sums: false`, `open_page: requantize`); [performance](performance.md) measures them on processors."
    )
    yield ""
    rows = []
    for data, length in (("IMDb", "short"), ("HumanEval", "short"), ("arXiv", "long"), ("Cocktail", "long")):
        without_sums, requantized = ablation_s(setup_of(paper.cases[data]), 16)
        jct = sum(good_engine(setup_of(paper.cases[data]), Codec(name="hack-paper"), 16))
        told = (span(paper.fig13[f"{name}_{length}"]) for name in ("se", "rqe"))
        ours = (f"{100 * seconds / jct:.2f}" for seconds in (without_sums, requantized))
        rows.append((data, *(cell for pair in zip(told, ours, strict=True) for cell in pair)))
    yield from table(("data set", "without SE: paper", "ours", "without RQE: paper", "ours"), rows)


def ablation_s(at: Setup, batch: int) -> tuple[float, float]:
    """Seconds that decoding takes longer per request in a good engine: (without SE, without RQE)."""
    good, model, gpu = Efficiency(), at.model, at.decode_gpu
    codes = 2 * model.layers * model.kv_heads * model.head_dim
    flops = at.decode_tp * gpu.fp16_tflops * 1e12 * good.compute
    memory = at.decode_tp * gpu.memory_gb_s * 1e9 * good.memory
    page = sizes_of(Codec(name="hack-paper"), model.kv_shape).footprint.page_bytes
    steps = batch * (round(at.output) - 1)
    return steps * at.prompt * codes / flops, steps * 2 * page / memory


def good_jct(codec: str, page_tokens: int) -> float:
    """JCT in seconds of Cocktail on A10G, with a good engine at batch 16 and pages of `page_tokens`."""
    at = setup_of(numbers().cases["Cocktail"])
    return sum(good_engine(at, Codec(name=codec, settings={"page_tokens": page_tokens}), 16))
