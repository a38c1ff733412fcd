"""Results of `python -m bench.reliability`: one JSON record of all scenarios, and a table made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.reliability.load import Outcome
from bench.reliability.scenarios import SCENARIOS, Scenario
from bench.sections import read_section, write_section

ERROR_WINDOW_S = 10.0
PAGE, SECTION = "reliability", "bench.reliability"


@dataclass(frozen=True, slots=True)
class Result:
    """The judged results of one scenario. Times are in seconds; latencies are those of whole requests."""

    scenario: str
    requests: int
    rate: float
    succeeded: int
    errors: dict[str, int]
    tokens_differ: int
    """Requests that were served with other tokens than in the undisturbed run."""
    moved: int
    """Requests that went to another node because their node ended."""
    disturbed_at_s: float
    error_window_s: float
    """Time from the disturbance to the end of the last failed request; 0 if none failed."""
    slowest_s: float
    longest_wait_s: float
    """The longest time that a client waited for the next token."""
    calm_p50_s: float
    p50_s: float
    failovers: dict[str, float]
    replayed_tokens: float
    machine: str
    load_average: float
    """Load average of the last minute of the run."""
    commit: str

    @property
    def holds(self) -> bool:
        """Whether enough requests were served, with the right tokens, and errors stopped within `ERROR_WINDOW_S`."""
        enough = self.succeeded >= SCENARIOS[self.scenario].wanted_share * self.requests
        return enough and not self.tokens_differ and self.error_window_s <= ERROR_WINDOW_S


def judge(
    scenario: Scenario,
    calm: Sequence[Outcome],
    outcomes: Sequence[Outcome],
    rate: float,
    disturbed_at_s: float,
    after: dict[str, float],
    where: tuple[str, float, str],
) -> Result:
    """Compare a disturbed run with the undisturbed one, request by request.

    `after` is the router's metrics page, `where` the machine, its load average and the commit.
    """
    machine, load_average, commit = where
    failed = [outcome for outcome in outcomes if outcome.error]
    served = [(was, now) for was, now in zip(calm, outcomes, strict=True) if not now.error]
    failovers = {key: value for key, value in after.items() if key.startswith("hackkv_failovers_total") and value}
    return Result(
        scenario=scenario.name,
        requests=len(outcomes),
        rate=rate,
        succeeded=len(served),
        errors=dict(Counter(outcome.error for outcome in failed)),
        tokens_differ=sum(was.token_ids != now.token_ids for was, now in served),
        moved=sum(outcome.attempts > 1 for outcome in outcomes),
        disturbed_at_s=disturbed_at_s,
        error_window_s=max((outcome.ended_s - disturbed_at_s for outcome in failed), default=0.0),
        slowest_s=max(outcome.ended_s - outcome.began_s for outcome in outcomes),
        longest_wait_s=max(outcome.longest_wait_s for outcome in outcomes),
        calm_p50_s=_median(calm),
        p50_s=_median(outcomes),
        failovers={key.removeprefix("hackkv_failovers_total"): value for key, value in failovers.items()},
        replayed_tokens=after.get("hackkv_replayed_tokens_total", 0.0),
        machine=machine,
        load_average=load_average,
        commit=commit,
    )


def _median(outcomes: Sequence[Outcome]) -> float:
    times = sorted(outcome.ended_s - outcome.began_s for outcome in outcomes)
    return times[len(times) // 2]


def save(result: Result, folder: Path) -> None:
    """Add a result to the record of all scenarios, and write the table again."""
    known = {**(read_section(folder, SECTION, PAGE) or {}), result.scenario: asdict(result)}
    ordered = [Result(**known[name]) for name in SCENARIOS if name in known]
    write_section(folder, SECTION, table(ordered), known, PAGE)


def table(results: Sequence[Result]) -> str:
    """The table of the results in Markdown."""
    lines = [
        "| what happens | served | tokens equal | sent elsewhere | error window | longest wait for a token "
        "| median request, calm / disturbed | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        scenario = SCENARIOS[result.scenario]
        cells = (
            f"{scenario.what} ({scenario.num_prefill}P + {scenario.num_decode}D)",
            f"{result.succeeded}/{result.requests}",
            "all" if not result.tokens_differ else f"{result.tokens_differ} differ",
            str(result.moved),
            f"{result.error_window_s:.1f} s" if result.errors else "none",
            f"{result.longest_wait_s:.1f} s",
            f"{result.calm_p50_s:.2f} / {result.p50_s:.2f} s",
            scenario.published,
        )
        lines.append(f"| {' | '.join(cells)} |")
    for where in sorted({(result.rate, result.machine, result.commit) for result in results}):
        lines += ["", _where([result for result in results if (result.rate, result.machine, result.commit) == where])]
    return "\n".join(lines)


def _where(results: Sequence[Result]) -> str:
    """A line about the machine and the load of results that have one rate, machine and commit."""
    some, loads = results[0], [result.load_average for result in results]
    load = f"{min(loads):.1f} to {max(loads):.1f}" if len(set(loads)) > 1 else f"{loads[0]:.1f}"
    return (
        f"{some.rate:g} requests a second. Machine: {some.machine}, load average {load} (1 min). Commit {some.commit}."
    )
