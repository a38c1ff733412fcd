"""The cost of guiding: compiling a grammar, and the mask of each token, on one thread.

    python -m bench.guided [MODEL]

Random JSON schemas (`tests.schemas`) are walked to random outputs over the model's vocabulary. If xgrammar is installed
(it is no dependency), the same outputs go through its matcher too: `pip install --target DIR xgrammar`, then
`PYTHONPATH=DIR`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from transformers import PreTrainedTokenizerFast

from hackkv.errors import GuideError
from hackkv.guide import Guide, Guides
from hackkv.model.shipped import find_model
from router.api.grammar_child import make_grammar
from tests.schemas import REAL, random_schema

SCHEMAS = 100
MOST_TOKENS = 200

Step = Callable[[int], None]
"""Makes the mask before a token, and then accepts the token."""


def walk(guide: Guide, eos: int, seed: int) -> list[int]:
    """A random output, without its end token."""
    rng, output = random.Random(seed), list[int]()
    while len(output) < MOST_TOKENS:
        allowed = np.flatnonzero(np.unpackbits(guide.allowed(), bitorder="little"))
        token_id = int(rng.choice(allowed))
        if token_id == eos:
            break
        guide.accept(token_id)
        output.append(token_id)
    return output


def llguidance_steps(schemas: list[str], guides: Guides) -> Iterator[tuple[float, Step]]:
    """(seconds to compile, step) for each schema, with llguidance."""
    for schema in schemas:
        began = perf_counter()
        guide = guides.open(make_grammar("json", schema, lenient=False, thinking="never"))
        compiled = perf_counter() - began

        def step(token_id: int, guide: Guide = guide) -> None:
            guide.allowed()
            guide.accept(token_id)

        yield compiled, step


def xgrammar_steps(schemas: list[str], tokenizer: PreTrainedTokenizerFast, vocab: int) -> Iterator[tuple[float, Step]]:
    """(seconds to compile, step) for each schema, with xgrammar."""
    xgrammar: Any = import_module("xgrammar")
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab), max_threads=1, cache_enabled=False
    )
    bits = xgrammar.allocate_token_bitmask(1, vocab)
    for schema in schemas:
        began = perf_counter()
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=True))
        compiled = perf_counter() - began

        def step(token_id: int, matcher: Any = matcher) -> None:
            matcher.fill_next_token_bitmask(bits)
            if not matcher.accept_token(token_id):
                raise GuideError("not allowed")

        yield compiled, step


def report(name: str, steps: Iterator[tuple[float, Step]], outputs: list[list[int]]) -> None:
    """Print one line: the times of grammars and of tokens."""
    compiles, masks, refused = list[float](), list[float](), 0
    for (compiled, step), output in zip(steps, outputs, strict=True):
        compiles.append(compiled)
        try:
            for token_id in output:
                began = perf_counter()
                step(token_id)
                masks.append(perf_counter() - began)
        except GuideError:
            refused += 1
    compile_ms, mask_us = np.array(compiles) * 1e3, np.array(masks) * 1e6
    print(
        f"{name:10}  compile p50 {np.median(compile_ms):6.2f} ms, max {compile_ms.max():7.2f} ms;  "
        f"mask p50 {np.median(mask_us):6.1f} us, p99 {np.quantile(mask_us, 0.99):7.1f} us, max {mask_us.max():8.1f};  "
        f"{len(masks)} tokens, {refused} outputs refused"
    )


def main(model: Annotated[str, typer.Argument()] = "smollm2") -> None:
    """Print one line for each library."""
    folder = find_model(model).path
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    eos, vocab = int(tokenizer.eos_token_id), len(tokenizer)
    schemas = [json.dumps(schema) for schema in (*REAL.values(), *map(random_schema, range(SCHEMAS)))]
    guides = Guides(folder, (eos,))
    guides.open('start: "warm"')
    outputs = [
        walk(guides.open(make_grammar("json", schema, lenient=False, thinking="never")), eos, seed)
        for seed, schema in enumerate(schemas)
    ]
    print(f"{len(schemas)} schemas, vocabulary of {vocab}")
    fresh = Guides(folder, (eos,))
    fresh.open('start: "warm"')
    report("llguidance", llguidance_steps(schemas, fresh), outputs)
    if find_spec("xgrammar"):
        report("xgrammar", xgrammar_steps(schemas, tokenizer, vocab), outputs)


if __name__ == "__main__":
    typer.run(main)
