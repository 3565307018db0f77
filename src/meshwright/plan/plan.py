"""`make_plan`: enumerate, reject, price, choose, explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.cost.candidate import Candidate
from meshwright.cost.quantities import Job
from meshwright.errors import NoFeasibleLayout
from meshwright.plan.advice import batch_line, largest_microbatch, largest_seq_len, notes
from meshwright.plan.ladder import bought, ladder
from meshwright.plan.named import named_cuts
from meshwright.plan.option import Advice, Counts, Option, Options, Purchase, Rejection, Rung, gib
from meshwright.plan.purchase import fewest_devices
from meshwright.plan.refusals import count, rejections
from meshwright.plan.search import Found, runs, search
from meshwright.plan.setting import Setting
from meshwright.plan.space import Knobs, cuts_of, spread
from meshwright.spec.cluster import Cluster
from meshwright.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes:
        job: the model, the batch, the byte recipe and one device's memory.
        cluster: what it is to run on.
        knobs: what the user has fixed.
        layouts: words of the layouts to look at; none for every one that uses the whole cluster.
        asked: word of the layout that a recipe gives, to be shown beside the choice; empty for none.
        runs_first: a run is to start, so what this version runs comes first.
        cuttable: the optimizer can update a parameter of which each rank has some rows.
        elementwise: it updates each weight from the weight's own gradient and state.
        optimizer: its name, for the document.
        model_at: the model for another sequence length; None where that is unknown.
        origin: where the model's sizes come from.
        lines: sentences that belong to the request: defaults that were taken, the learning rate.
        top: candidates that the plan keeps.
    """

    job: Job
    cluster: Cluster
    knobs: Knobs = field(default_factory=Knobs)
    layouts: Sequence[str] = ()
    asked: str = ""
    runs_first: bool = False
    cuttable: bool = True
    elementwise: bool = True
    optimizer: str = "adamw"
    model_at: Callable[[int], ModelSpec] | None = None
    origin: str = ""
    lines: Sequence[str] = ()
    top: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choice, why, and what else there was.

    Attributes:
        request: what was planned.
        chosen: the best candidate that fits; None if none does.
        runnable: the best that fits and that this version runs; None if there is none.
        ladder: every rung of the rule.
        candidates: the best candidate of each of the best layouts, best first; of all named ones.
        rejections: a sample of what was rejected.
        counts: how many there were.
        advice: how far the choice could go.
        asked: the layout that the recipe gives, priced or rejected; None where it gives none.
    """

    request: Request
    chosen: Option | None
    runnable: Option | None
    ladder: tuple[Rung, ...]
    candidates: tuple[Option, ...]
    rejections: tuple[Rejection, ...]
    counts: Counts
    advice: Advice
    asked: Option | Rejection | None = None


def make_plan(request: Request) -> Plan:
    """Choose a layout and say why.

    Args:
        request: what is to be planned.

    Raises:
        LayoutError: a named layout that is no layout word.
    """
    setting = Setting(
        job=request.job, cluster=request.cluster, cuttable=request.cuttable, elementwise=request.elementwise
    )
    found = _searched(request, setting, request.layouts)
    options = Options(request.job, found)
    ranking = [int(place) for place in found.ranking()]
    fitting = [place for place in ranking if found.memory.fits[place] > 0]
    shown = ranking if request.layouts else fitting[: request.top]
    chosen = options.at(fitting[0]) if fitting else None
    runnable = found.first((found.memory.fits > 0) & runs(found.columns))
    purchase = fewest_devices(setting, request.knobs)
    return Plan(
        request=request,
        chosen=chosen,
        runnable=None if runnable is None else options.at(runnable),
        ladder=ladder(setting, found, options, purchase, named=bool(request.layouts)),
        candidates=tuple(options.at(place) for place in shown),
        rejections=rejections(setting, found, options, purchase),
        counts=count(found),
        advice=_advice(request, setting, chosen, purchase),
        asked=_asked(request, setting, purchase) if request.asked else None,
    )


def require_chosen(plan: Plan) -> Option:
    """The choice.

    Raises:
        NoFeasibleLayout: nothing fits; says by how much the best one misses, and what would fit.
    """
    if plan.chosen is not None:
        return plan.chosen
    request, rungs = plan.request, [rung for rung in plan.ladder if rung.option is not None]
    asked = f"{request.job.model.name} on {request.cluster.name}"
    purchase = plan.advice.purchase
    near = f"Nearest: {bought(purchase)}" if purchase else "Nearest: a smaller model, or devices with more memory."
    options = [rung.option for rung in rungs if rung.option is not None]
    if not options:
        first = plan.rejections[0] if plan.rejections else None
        why = f"no layout is legal: {first.layout}: {first.because}" if first else "there is no layout to look at."
        raise NoFeasibleLayout(asked, why, first.nearest if first else near)
    best = min(options, key=lambda option: option.shortfall_bytes)
    rule = (
        f"nothing fits; the least that is missing is {gib(best.shortfall_bytes)}: {best.word} needs "
        f"{gib(best.reserved_bytes)} of {gib(best.memory.capacity_bytes)}."
    )
    raise NoFeasibleLayout(asked, rule, near)


def _searched(request: Request, setting: Setting, layouts: Sequence[str]) -> Found:
    """All layouts over the whole cluster, or the named ones; a name says nothing of offload, so it has none."""
    knobs = request.knobs
    if layouts:
        cuts, knobs = named_cuts(layouts), replace(knobs, offload=knobs.offload or "none")
    else:
        cuts = cuts_of(request.cluster.num_devices, setting.node, request.job.model)
    space = spread(cuts, request.job.global_batch_size, knobs)
    return search(setting, space, runs_first=request.runs_first)


def _advice(request: Request, setting: Setting, chosen: Option | None, purchase: Purchase | None) -> Advice:
    if chosen is None:
        return Advice(purchase=purchase, lines=tuple(request.lines))
    one: Candidate = chosen.candidate
    longest = largest_seq_len(setting, one, request.model_at) if request.model_at else None
    return Advice(
        purchase=purchase,
        largest_microbatch=largest_microbatch(setting, one),
        largest_seq_len=longest,
        lines=(batch_line(setting, one), *notes(setting, one), *request.lines),
    )


def _asked(request: Request, setting: Setting, purchase: Purchase | None) -> Option | Rejection:
    """The layout that a recipe gives, with its best knobs."""
    found = _searched(replace(request, layouts=(request.asked,)), setting, (request.asked,))
    options = Options(request.job, found)
    if len(found.legal):
        return options.at(int(found.ranking()[0]))
    return rejections(setting, found, options, purchase)[0]
