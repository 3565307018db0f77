"""Predicted beside published memory: `make validate` runs it in seconds, without torch.

All rows of published/runs.csv that have a memory figure, or ran out of memory. Numbers that were fitted, and the rows
that they were fitted on, are in published/fits.py; those rows are never scored. Conventions of each program are in
published/programs.py; rows that lack a setting are in published/unscored.py, with the reason.

Exits with 1 if a goal on rows of trust A is missed by a row that is no known miss (published/score.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from published.fits import FIT_ROWS, FITTED
from published.measure import fitted_again
from published.predict import Prediction
from published.rows import Row, read_rows
from published.score import KNOWN_MISSES, Goal, Summary, goals, predictions_of, scored, summaries
from published.unscored import reason


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", metavar="SOURCE", help="print each row (of these sources)")
    options = parser.parse_args(arguments)
    rows = read_rows()
    predictions = predictions_of(rows)
    judged = scored(predictions)
    if options.rows is not None:
        print(*row_lines([one for one in predictions if _wanted(one, options.rows)]), sep="\n", end="\n\n")
    found = goals(judged)
    print(*table_lines(summaries(judged)), "", sep="\n")
    print(*fit_lines(), "", *goal_lines(found), "", *miss_lines(judged), "", *unscored_lines(rows), sep="\n")
    return 0 if all(goal.is_met for goal in found) else 1


def _wanted(one: Prediction, sources: Sequence[str]) -> bool:
    return not sources or any(one.row.id.startswith(source) for source in sources)


def table_lines(groups: Iterable[Summary]) -> Iterator[str]:
    """One line for each source: signed errors, and verdicts on the upper estimate."""
    head = f"{'source':22}{'trust':>6}{'rows':>6}{'runs':>6}{'median':>9}{'|median|':>10}{'worst':>8}"
    yield head + f"{'yes':>6}{'tight':>7}{'no':>5}{'OOM':>6}{'called yes':>12}"
    for group in groups:
        line = f"{group.source_key:22}{group.trust:>6}{len(group.errors) + group.oom:>6}{group.experiments:>6}"
        if group.errors:
            sizes, worst = [abs(error) for error in group.errors], max(group.errors, key=abs)
            line += f"{statistics.median(group.errors):>+9.1%}{statistics.median(sizes):>10.1%}{worst:>+8.1%}"
        else:
            line += f"{'-':>9}{'-':>10}{'-':>8}"
        verdicts = group.verdicts
        line += f"{verdicts['yes']:>6}{verdicts['tight']:>7}{verdicts['no']:>5}"
        yield line + (f"{group.oom:>6}{group.oom_called_yes:>12}" if group.oom else f"{'-':>6}{'-':>12}")


def fit_lines() -> Iterator[str]:
    """Each fitted number, and what the fit gives now."""
    yield "fitted (these rows are not scored)"
    for name, again in fitted_again().items():
        rows = f"{FIT_ROWS[name][0]} .. {FIT_ROWS[name][-1].rsplit('-', 1)[1]}"
        yield f"  {name:28}{FITTED[name]:8.3f}   now {again:6.3f}   from {rows}"


def goal_lines(found: Iterable[Goal]) -> Iterator[str]:
    """Each goal with what was found."""
    yield "goals on rows of trust A"
    for goal in found:
        shown = f"{goal.found:.1%} of at most {goal.limit:.0%}" if goal.limit else f"{goal.found:.0f} of at most 0"
        yield f"  {'met ' if goal.is_met else 'MISSED'}  {goal.name:46}{shown:26}{goal.rows:4} rows"
        if goal.misses:
            yield f"          {', '.join(goal.misses)}"


def miss_lines(judged: Sequence[Prediction]) -> Iterator[str]:
    """Share of tight verdicts, and the misses that are known."""
    ran = [one for one in judged if one.row.trust == "A" and not one.row.is_oom and one.capacity_gib]
    tight = sum(one.fits == "tight" for one in ran)
    yield f"called tight: {tight} of {len(ran)} rows of trust A that ran ({tight / len(ran):.0%})"
    for one in judged:
        if one.row.id in KNOWN_MISSES:
            yield f"known miss  {one.row.id}  {one.error:+.1%}  {KNOWN_MISSES[one.row.id]}"


def unscored_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Rows that are not scored, by source and reason."""
    counts = Counter((row.source_key, row.trust, why) for row in rows if (why := reason(row)))
    yield f"not scored: {counts.total()} rows"
    for (source_key, trust, why), count in counts.items():
        yield f"  {source_key:22}{trust:>4}{count:>5}   {why}"


def row_lines(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Every row: what was published, what is predicted."""
    for one in predictions:
        row, error = one.row, "OOM" if one.error is None else f"{one.error:+.1%}"
        cut = f"dp{row.dp} tp{row.tp} pp{row.pp} cp{row.cp}"
        figures = f"{row.measured_gib or 0:8.2f}{one.predicted_gib:8.2f} {error:>7}"
        limits = f"upper {one.upper_gib:6.1f} of {one.capacity_gib:6.1f} GiB: {one.fits}"
        yield f"{row.id:26}{row.model:22}{cut:24}{figures}  {one.moment:13}{limits}"


if __name__ == "__main__":
    sys.exit(main())
