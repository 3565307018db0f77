"""A plan as one JSON document: the numbers behind every word of report/plan_text.py, in bytes."""

from __future__ import annotations

from typing import Any

from meshwright.cost.candidate import OFFLOADS, RECOMPUTE, SCHEDULES
from meshwright.plan.option import Advice, Counts, Option, Purchase, Rejection, Rung
from meshwright.plan.plan import Plan, Request
from meshwright.spec.cluster import cluster_table
from meshwright.spec.estimate import MemoryEstimate, Term


def plan_document(plan: Plan) -> dict[str, Any]:
    """The whole plan, ready for `json.dumps`.

    `runnable` is the best candidate that this version runs, null if none of them fits; `asked` the layout that the
    recipe gives, a candidate or a rejection, null where it gives none.
    """
    return {
        "workload": _workload(plan.request),
        "cluster": cluster_table(plan.request.cluster),
        "chosen": _candidate(plan.chosen),
        "runnable": _candidate(plan.runnable),
        "ladder": [_rung(rung) for rung in plan.ladder],
        "candidates": [_candidate(option) for option in plan.candidates],
        "rejections": [_rejection(one) for one in plan.rejections],
        "counts": _counts(plan.counts),
        "asked": _rejection(plan.asked) if isinstance(plan.asked, Rejection) else _candidate(plan.asked),
        "advice": _advice(plan.advice),
    }


def _workload(request: Request) -> dict[str, Any]:
    job, model = request.job, request.job.model
    return {
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "frozen_parameters": model.frozen_parameters,
            "n_layers": model.n_layers,
            "d_model": model.d_model,
            "n_heads": model.n_heads,
            "n_kv_heads": model.n_kv_heads,
            "n_experts": model.n_experts,
            "vocab_size": model.vocab_size,
            "tied_embeddings": model.tied,
            "max_seq_len": model.max_seq_len,
            "source": request.origin or model.source,
            "priced_by": model.source,
            "confidence": model.confidence,
            "architecture": dict(model.architecture),
        },
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
        "precision": model.compute,
        "optimizer": request.optimizer,
        "states": {
            "name": job.states.name,
            "parameter_bytes": job.states.parameter_bytes,
            "gradient_bytes": job.states.gradient_bytes,
            "optimizer_bytes": job.states.optimizer_bytes,
            "source": job.states.source,
        },
        "engine": job.engine.name,
    }


def _candidate(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    one = option.candidate
    return {
        "layout": option.word,
        "runs": option.runs,
        "microbatch_size": one.microbatch_size,
        "grad_accum_steps": one.num_microbatches,
        "recompute": RECOMPUTE[one.recompute],
        "pp_schedule": SCHEDULES[one.schedule] if one.pp > 1 else None,
        "pp_chunks": one.chunks,
        "sync": "every" if one.sync_every else "last",
        "offload": OFFLOADS[one.offload],
        "memory": _memory(option.memory),
        "traffic": {
            "terms": [_term(term) for term in option.sent],
            "total_bytes": _plain(sum(term.amount for term in option.sent)),
        },
        "time": None,
    }


def _memory(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "moment": memory.moment,
        "terms": [_term(term) for term in memory.terms],
        "total_bytes": memory.total_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "fits": memory.fits,
    }


def _term(term: Term) -> dict[str, Any]:
    return {"name": term.name, "bytes": _plain(term.amount), "formula": term.formula, "source": term.source}


def _plain(amount: float) -> int | float:
    """A whole number of bytes as such."""
    return int(amount) if float(amount).is_integer() else amount


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "candidate": _candidate(rung.option),
        "legal": rung.is_legal,
        "fits": rung.fits,
        "shortfall_bytes": rung.shortfall_bytes,
        "because": rung.because,
        "fix": rung.fix,
    }


def _rejection(one: Rejection) -> dict[str, Any]:
    return {
        "layout": one.layout,
        "rule": one.rule,
        "because": one.because,
        "nearest": one.nearest,
        "candidate": _candidate(one.option),
    }


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "considered": counts.considered,
        "legal": counts.legal,
        "fitting": counts.fitting,
        "rejected": dict(counts.rejected),
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "fewest_devices": _purchase(advice.purchase),
        "largest_microbatch_size": advice.largest_microbatch,
        "largest_seq_len": advice.largest_seq_len,
        "lines": list(advice.lines),
    }


def _purchase(purchase: Purchase | None) -> dict[str, Any] | None:
    if purchase is None:
        return None
    return {
        "num_devices": purchase.num_devices,
        "nodes": purchase.nodes,
        "candidate": _candidate(purchase.option),
    }
