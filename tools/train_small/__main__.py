"""python -m tools.train_small small.yaml: gathers the corpus, trains, and with --export writes and measures the model.

Everything made on the way (tokenizer, ids, checkpoints, log) is kept in --work; a run that was stopped goes on from its
last checkpoint, and a finished one is only exported and measured.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from measure.tasks import Ids, Phrases
from tools.train_small import corpus, evaluate, export, tokenizer
from tools.train_small.rows import Material
from tools.train_small.settings import Settings, load
from tools.train_small.train import Run


def prepare(settings: Settings, work: Path) -> tuple[PreTrainedTokenizerFast, Ids, Ids]:
    """The tokenizer, the training ids and the held-out ids; made once and kept in `work`."""
    documents, unseen = corpus.gather(settings.corpus, work)
    texts, held_out = [d.text for d in documents], [d.text for d in unseen]
    tok = tokenizer.load_or_train(work / "tokenizer", texts, settings.model.vocab, settings.model.context)
    cache = work / "ids.npz"
    if not cache.exists():
        np.savez(cache, train=_ids(tok, texts), held_out=_ids(tok, held_out))
    stored = np.load(cache)
    return tok, stored["train"].astype(np.int64), stored["held_out"].astype(np.int64)


def _ids(tok: PreTrainedTokenizerFast, texts: list[str]) -> Ids:
    """All texts in a shuffled order, each ended by <|endoftext|>."""
    order = np.random.default_rng(0).permutation(len(texts))
    end = [tok.convert_tokens_to_ids(tokenizer.END_OF_TEXT)]
    return np.concatenate([np.array(tok.encode(texts[i], add_special_tokens=False) + end) for i in order])


def phrases(tok: PreTrainedTokenizerFast) -> Phrases:
    """The task phrases in this tokenizer."""
    vocab = [str(tok.decode([i])) for i in range(len(tok))]
    return Phrases.build(lambda text: tok.encode(text, add_special_tokens=False), vocab, frozenset(tok.all_special_ids))


def publish(settings: Settings, run: Run, work: Path, folder: Path, trials: int) -> None:
    """Write the model to `folder`, measure what was written, and write the card."""
    tok, train_ids, held_out = prepare(settings, work)
    documents, unseen = corpus.gather(settings.corpus, work)
    export.write_model(run, tok, folder)
    export.write_held_out(unseen, folder / "held_out.jsonl")
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()  # type: ignore[no-untyped-call]
    subject = evaluate.Subject(model, tok, phrases(tok), held_out)
    report = evaluate.measure(subject, trials)
    report |= {"parameters": model.num_parameters(), "samples": evaluate.samples(subject)}
    report |= {"characters": sum(len(d.text) for d in documents), "corpus_tokens": len(train_ids)}
    (work / "report.json").write_text(json.dumps(report, indent=2))
    export.write_card(export.read_log(work / "log.jsonl"), report, folder)


def main() -> None:
    """Parse arguments, train what is left to train, export if asked."""
    parser = argparse.ArgumentParser("python -m tools.train_small", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/train_small"))
    parser.add_argument("--export", type=Path, help="folder to write the model and its card to")
    parser.add_argument("--trials", type=int, default=100, help="examples per measured bar")
    args = parser.parse_args()
    settings = load(args.config)
    tok, train_ids, held_out = prepare(settings, args.work)
    print(f"{len(train_ids):,} training tokens, {len(held_out):,} held out")
    material = Material(train_ids, phrases(tok), lambda text: tok.encode(text, add_special_tokens=False))
    run = Run(args.work, settings.model, settings.train)
    run.train(material)
    if args.export and not run.stopped:
        publish(settings, run, args.work, args.export, args.trials)


if __name__ == "__main__":
    main()
