"""hackkv: a router, a prefill and a decode node as processes that share the cores, through HTTP. `kv` is a codec."""

from __future__ import annotations

from bench.peers.ours import Run, serve, serve_together
from bench.peers.systems.child import Answer, Job, Result, main
from hackkv import __version__
from hackkv.model.shipped import find_model


def measure(job: Job) -> Result:
    """Do a job. Prefill is all time that is not decode, so it includes HTTP, queues and wire."""
    folder, codec, answers = find_model(job.gguf).path, {"name": job.kv}, list[Answer]()

    def done(_: int, run: Run) -> None:
        decode_s = run.stages["decode"]
        answers.append(Answer(run.jct_s - decode_s, decode_s))

    if job.together:
        took_s = serve_together(folder, codec, job.prompts, job.tokens, job.threads)
        return Result(__version__, together_s=took_s)
    serve(folder, codec, job.prompts, job.tokens, job.threads, done)
    return Result(__version__, answers)


if __name__ == "__main__":
    main(measure)
