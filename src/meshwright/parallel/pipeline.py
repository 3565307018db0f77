"""One step of a pipeline: torch's schedules over this rank's stages, on the microbatches of a step.

    gpipe                    all forward passes, then all backward passes
    1f1b                     as soon as it can, each backward pass; a stage keeps few microbatches at once
    interleaved1f1b          the same with several stages a rank: less waiting, more to send
    interleaved-zero-bubble  backward in two: inputs first, for the stage before; weights when there is nothing to do
    zbv                      the same over a V: a rank has the first and the last stage, or two next to each other

What torch's stages do besides is switched off: they divide gradients, and reduce them over data-parallel ranks through
FSDP, which does not see the gradients of weights that are made apart from those of inputs. Here each stage hands on
what its parameters got after each of its backward passes (see harvest.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.errors import MeshwrightError
from meshwright.models.chain import Section
from meshwright.parallel.letters import receive_tensor, send_tensor
from meshwright.parallel.mesh import Mesh
from meshwright.spec.stage_cut import rank_of

SINGLE: Final[Mapping[str, type[PipelineScheduleSingle]]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: Final[Mapping[str, type[PipelineScheduleMulti]]] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Who is told of a pass over one microbatch, by its place in the step.

    Attributes:
        forward: forward(place, is_root): before a forward pass; is_root says that it is the model's own that begins.
        backward: before a backward pass.
        harvest: harvest(stage, place): after the backward pass of weights.
        objective: objective(place, output): what backward starts from, on the last stage.
    """

    forward: Callable[[int, bool], None]
    backward: Callable[[int], None]
    harvest: Callable[[int, int], None]
    objective: Callable[[int, torch.Tensor], torch.Tensor]


@final
class Door(nn.Module):
    """The way into one stage: says which microbatch comes."""

    def __init__(self, section: Section, upcast: bool) -> None:
        super().__init__()
        self.section, self._upcast = section, upcast
        self.seq_len = 0
        self.forward_of: Callable[[int, bool], None] = lambda place, is_root: None

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Run the stage; x: tokens (b, s) or hidden states (b, s, d); place: (1,) of the microbatch in the step."""
        self.forward_of(int(place), self.section.begins and not self.section.calls_model)
        out: torch.Tensor = self.section(x, self.seq_len)
        if out._is_view() and not self.section.ends:
            out = out.clone()  # torch detaches what a stage gives in place, which a view forbids
        return out.float() if self._upcast else out  # a loss summed in bf16 has 3 digits


@final
class Stage(PipelineStage):
    """A stage whose gradients are handed on after each backward pass, and reduced by nobody here."""

    visits: Visits
    _place = 0

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note whose backward pass it is."""
        self._place = bwd_chunk_id
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note whose backward pass it is."""
        self._place = bwd_chunk_id
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass of inputs ("input"), of weights ("weight") or of both ("full")."""
        self.visits.backward(self._place)
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        if backward_type == "input":
            _forget(args[0]["input_values"])
        else:
            self.visits.harvest(self.stage_index, self._place)
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: it is done once for all stages, when the schedule is over."""


def _forget(received: Sequence[Any]) -> None:
    """Drop gradients that torch leaves on the buffers of what was received, for good; those sent are the result's."""
    for tensor in received:
        if isinstance(tensor, torch.Tensor):
            tensor.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRules:
    """How a pipeline runs.

    Attributes:
        schedule: its word.
        num_stages: over all ranks.
        num_microbatches: of a step on this rank; a schedule is made for so many.
        inputs: type that floating-point inputs of the model are cast to; None for their own.
        upcast: the last stage's output is cast to fp32.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    inputs: torch.dtype | None
    upcast: bool


@final
class Pipeline:
    """This rank's stages and their schedule.

    Args:
        mesh: this rank.
        sections: its stages by number.
        rules: how it runs.
    """

    def __init__(self, mesh: Mesh, sections: Mapping[int, Section], rules: PipelineRules) -> None:
        self.mesh, self.rules, self.sections = mesh, rules, sections
        last = rules.num_stages - 1
        self._doors = {k: Door(section, rules.upcast and k == last) for k, section in sections.items()}
        self._stages: list[Stage] = []
        self._schedule: Any = None
        self._shape: tuple[int, ...] = ()
        self._like = torch.empty(0)
        # torch prints whole schedules, on every rank, when a stage fails.
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

    @property
    def begins(self) -> bool:
        """Does this rank have the first stage?"""
        return 0 in self.sections

    @property
    def ends(self) -> bool:
        """Does this rank have the last stage?"""
        return self.rules.num_stages - 1 in self.sections

    def received(self) -> list[torch.Tensor]:
        """What the stages keep to receive in, from step to step: a tensor for each microbatch, each way."""
        tables: list[Any] = [table for s in self._stages for table in (s.args_recv_info, s.grad_recv_info)]
        buffers = [info.buffer for table in tables for infos in table.values() for info in infos]
        return [buffer for buffer in buffers if buffer is not None]

    def run(self, inputs: Sequence[torch.Tensor], visits: Visits) -> None:
        """Forward and backward of a step's microbatches.

        Args:
            inputs: of the first stage, all of one shape; other ranks read their shape alone.
            visits: who is told.

        Raises:
            MeshwrightError: whatever a model or a loss raised of them.
        """
        inputs = [self._cast(each) for each in inputs]
        self._prepare(inputs[0])
        for stage in self._stages:
            stage.visits = visits
        for door in self._doors.values():
            door.forward_of, door.seq_len = visits.forward, inputs[0].shape[1]
        places = torch.arange(len(inputs))
        self._objective = visits.objective
        first = (torch.cat(list(inputs)),) if self.begins else ()
        target = {"target": places} if self.ends else {}
        with _plainly():
            self._schedule.step(*first, place=places, return_outputs=False, **target)
        self._let_go()

    def _let_go(self) -> None:
        """Of what went from one stage to the next on this rank: torch keeps it until the next step's comes."""
        pp, schedule = self.mesh.layout.pp, self.rules.schedule
        for stage in self._stages:
            for table, other in ((stage.args_recv_info, -1), (stage.grad_recv_info, 1)):
                at = stage.stage_index + other
                if 0 <= at < self.rules.num_stages and rank_of(at, pp, schedule) == self.mesh.pp_rank:
                    for info in (info for infos in table.values() for info in infos if hasattr(info, "buffer")):
                        info.buffer = None

    def _loss(self, output: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return self._objective(int(place), output)

    def evaluate(
        self,
        inputs: Sequence[torch.Tensor],
        forward: Callable[[int, bool], None],
        done: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Forward passes alone, microbatch by microbatch: each rank waits for its neighbour's output.

        Args:
            inputs: of the first stage, of any shapes, the same number on every rank.
            forward: told the place of each microbatch before it.
            done: given the place and the last stage's output.
        """
        pp, schedule, group = self.mesh.layout.pp, self.rules.schedule, self.mesh.groups.pp
        for place, first in enumerate(inputs):
            x = self._cast(first)
            for stage in range(self.rules.num_stages):
                door, before = self._doors.get(stage), rank_of(stage - 1, pp, schedule) if stage else None
                if door is None:
                    continue
                if before is not None and before != self.mesh.pp_rank:
                    x = receive_tensor(dist.get_global_rank(group, before), group, self.mesh.device)
                door.forward_of, door.seq_len = forward, first.shape[1]
                x = door(x, torch.tensor([place]))
                after = rank_of(stage + 1, pp, schedule) if stage + 1 < self.rules.num_stages else None
                if after is not None and after != self.mesh.pp_rank:
                    send_tensor(x, dist.get_global_rank(group, after), group)
            if self.ends:
                done(place, x)

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.rules.inputs
        return x if dtype is None or not x.is_floating_point() else x.to(dtype)

    def _prepare(self, first: torch.Tensor) -> None:
        """Make stages and schedule for inputs of a shape; collective along pp."""
        if self._shape == tuple(first.shape):
            return
        self._shape = tuple(first.shape)
        hidden = self._hidden(first)
        stages, device, group = [], self.mesh.device, self.mesh.groups.pp
        for k, door in self._doors.items():
            stream = torch.empty(hidden[0], dtype=hidden[1], device="meta", requires_grad=True)
            begins = k == 0
            stage = Stage(
                door, k, self.rules.num_stages, device, group=group, output_args=stream,
                input_args=torch.empty(first.shape, dtype=first.dtype, device="meta") if begins else stream,
            )  # fmt: skip
            stages.append(stage)
        self._stages = stages
        loss, n = self._loss, self.rules.num_microbatches
        if self.rules.schedule in SINGLE:
            self._schedule = SINGLE[self.rules.schedule](stages[0], n, loss_fn=loss, scale_grads=False)
        else:
            self._schedule = MULTI[self.rules.schedule](list(stages), n, loss_fn=loss, scale_grads=False)

    def _hidden(self, first: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of what travels between stages: the first one tries it, and tells the others."""
        found: list[Any] = [None]
        if self.begins:
            with torch.no_grad():
                tried = self._doors[0].section(first, first.shape[1])
            found = [(tried.shape, tried.dtype)]
        group = self.mesh.groups.pp
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group, device=self.mesh.device)
        shape, dtype = found[0]
        return shape, dtype


@contextmanager
def _plainly() -> Iterator[None]:
    """Raise the error of ours that torch has wrapped into its own, with the whole schedule as text."""
    try:
        yield
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, MeshwrightError):
            inner = inner.__cause__
        if inner is None or inner is error:
            raise
        raise inner from error
