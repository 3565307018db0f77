"""Who is blamed: a pure function of what is known about each rank."""

from __future__ import annotations

import signal

import pytest

from meshwright.errors import BatchError, NonFiniteError, SpecError
from meshwright.train.blame import Witness, find_cause
from meshwright.train.lastwords import (
    EXIT,
    LOST_PEER,
    RETURNED,
    LastWords,
    format_words,
    last_words,
    lost_peer,
    parse_words,
    revive,
)
from meshwright.train.pulse import Moment, Pulse, create_board, open_board, read_moment

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:59528"
LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:112] Timed out waiting 5000ms for recv"


def lost(rank, text=CLOSED, wall_s=1.0):
    return LastWords(rank, LOST_PEER, ("RuntimeError", "Exception"), text, exit_code=4, wall_s=wall_s)


def raised(rank, error, wall_s=1.0):
    words = last_words(rank, error)
    return LastWords(words.rank, words.kind, words.family, words.message, words.parts, words.faults, wall_s=wall_s)


def ended(rank, words=None, code=4, step=5):
    return Witness(rank, ended=True, exit_code=code, words=words, moment=Moment(step, "backward", 0, 1.0))


def alive(rank, step=5, **known):
    return Witness(rank, moment=Moment(step, "forward", -1, 1.0), **known)


AFTER_4 = "after step 4 (in backward of microbatch 0 of step 5)"
VERDICTS = {
    "a signal beats the noise": (
        [ended(0, lost(0)), ended(1, code=-9), ended(2, lost(2))],
        f"rank 1 was killed by SIGKILL {AFTER_4}",
    ),
    "an error beats the noise, however late it is heard": (
        [ended(0, lost(0, wall_s=1)), ended(1, raised(1, ValueError("x"), wall_s=2))],
        f"rank 1 raised ValueError: x; {AFTER_4}",
    ),
    "of two errors the first": (
        [ended(0, raised(0, ValueError("late"), wall_s=2)), ended(1, raised(1, KeyError("early"), wall_s=1))],
        "rank 1 raised KeyError: 'early'",
    ),
    "an abort is a consequence if there is a cause": (
        [ended(0, code=-6), ended(1, raised(1, ValueError("x")))],
        "rank 1 raised ValueError",
    ),
    "an abort alone is the cause": ([ended(0, lost(0)), ended(1, code=-6)], "rank 1 was killed by SIGABRT"),
    "an unknown signal has a number": ([ended(0, code=-35)], "rank 0 was killed by signal 35"),
    "an exit without a word": ([ended(0, lost(0)), ended(1, code=7)], "rank 1 ended with exit code 7"),
    "a death on which nobody has a code": ([ended(0, lost(0)), ended(1, code=None)], f"rank 1 died {AFTER_4}"),
    "sys.exit": (
        [ended(0, lost(0)), ended(1, LastWords(1, EXIT, message="sys.exit(3)"), 3)],
        f"rank 1 ended by sys.exit(3) {AFTER_4}",
    ),
    "an early return": (
        [ended(0, lost(0)), ended(1, LastWords(1, RETURNED), 0)],
        "rank 1 returned from main after step 4",
    ),
    "the one that did not come": (
        [ended(0, lost(0, LATE)), alive(1, step=3), alive(2, step=5)],
        "rank 1 hangs: it is alive, and did not come to the collective where rank 0 waited; "
        "last seen after step 2 (in forward of step 3): rank 0 waited until the time-out.",
    ),
    "one that never came at all": (
        [ended(0, lost(0, LATE)), Witness(1, joined=False)],
        "rank 1 never came to the meeting point where rank 0 waited",
    ),
    "a stopped one": ([ended(0, lost(0, LATE)), alive(1, stopped_s=12.0)], "rank 1 has been stopped for 12 s"),
    "a silent one": ([ended(0, lost(0)), alive(1, silent_s=4.0)], "rank 1 has given no sign of life for 4 s"),
    "all lost each other": (
        [ended(0, lost(0, wall_s=2), step=6), ended(1, lost(1, wall_s=1))],
        "the ranks lost each other; rank 1 was the furthest behind",
    ),
}


@pytest.mark.parametrize(("witnesses", "says"), VERDICTS.values(), ids=VERDICTS.keys())
def test_the_first_cause(witnesses, says):
    assert says in str(find_cause(witnesses))


def test_our_errors_keep_their_class_and_parts():
    words = parse_words(format_words(raised(1, BatchError("batch", "8 is not 3 x n", "Try 9."))))
    error = revive(words, name_rank=True)
    assert type(error) is BatchError
    assert (error.asked, error.rule, error.nearest) == ("rank 1: batch", "8 is not 3 x n", "Try 9.")
    assert error.faults[0].where == "batch"


def test_the_same_error_of_all_names_no_rank():
    witnesses = [ended(rank, raised(rank, NonFiniteError("the loss", "it is NaN"))) for rank in range(2)]
    assert str(find_cause(witnesses)) == "the loss: it is NaN"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError(LATE), True),
        (ConnectionError("Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(CLOSED), False),
        (TimeoutError("my own server"), False),
        (SpecError("x"), False),
    ],
)
def test_noise_is_told_from_causes(error, is_lost):
    assert lost_peer(error) is is_lost


def test_noise_is_found_below_another_error():
    outer = KeyError("cleanup failed")
    outer.__context__ = RuntimeError(CLOSED)
    assert lost_peer(outer)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (Moment(), "before its first step"),
        (Moment(1, "forward", 0), "before the end of step 1 (in forward of microbatch 0 of step 1)"),
        (Moment(8, "backward", 2), "after step 7 (in backward of microbatch 2 of step 8)"),
        (Moment(8, "optimizer"), "after step 7 (in optimizer of step 8)"),
        (Moment(8, ""), "after step 7 (in step 8)"),
        (Moment(8, "done"), "after step 8"),
    ],
)
def test_a_moment_in_words(moment, text):
    assert str(moment) == text


def test_a_beat_is_seen_through_the_file(tmp_path):
    create_board(tmp_path / "pulse", 3)
    pulse = Pulse(open_board(tmp_path / "pulse"), 1)
    pulse.beat(7, "a phase with a very long name, longer than its slot", 2)
    pulse.throb()
    with open_board(tmp_path / "pulse") as board:
        seen = read_moment(board, 1)
        assert (seen.step, seen.microbatch, seen.phase) == (7, 2, "a phase with a very long name, longer th")
        assert seen.heart_s > 0
        assert read_moment(board, 0) == read_moment(board, 2) == Moment()


def test_the_names_of_signals_are_the_systems():
    assert "SIGBUS" in str(find_cause([ended(0, code=-signal.SIGBUS)]))


def our_own_bug() -> None:
    from meshwright.spec.schedule import lr_multiplier

    lr_multiplier(None, 1, 0)  # type: ignore[arg-type]


def their_bug() -> None:
    {}["missing"]


def called_wrongly() -> None:
    from meshwright.parallel.entry import Entry

    Entry(None)(their_bug)  # type: ignore[arg-type]


@pytest.mark.parametrize(("raises", "code"), [(our_own_bug, 70), (their_bug, 4), (called_wrongly, 4)])
def test_a_fault_of_our_own_is_told_from_one_of_the_users(raises, code) -> None:
    try:
        raises()
    except Exception as error:
        assert last_words(0, error).exit_code == code
    else:
        pytest.fail("nothing was raised")


def test_the_part_of_the_model_stands_behind_the_phase():
    pulse = Pulse()
    pulse.beat(3, "forward", 1)
    for name in ("blocks.0", "encoder.with.a.name.that.is.far.too.long.for.a.slot.layers.31"):
        pulse.enter(name)
    seen = pulse.read()
    assert (seen.step, seen.microbatch) == (3, 1)
    assert len(seen.phase) == 40 and seen.phase.startswith("forward (") and seen.phase.endswith(".slot.layers.31)")
    pulse.beat(3, "backward", 1)
    pulse.enter("after 6 calls")
    assert str(pulse.read()).endswith("(in backward (after 6 calls) of microbatch 1 of step 3)")


def test_ranks_that_stood_in_different_parts_are_told_to_call_the_same():
    def at(rank: int, phase: str, **more: object) -> Witness:
        return Witness(rank, moment=Moment(2, phase, 0, 1.0), **more)  # type: ignore[arg-type]

    dead = {"ended": True, "exit_code": -signal.SIGABRT}
    apart = find_cause([at(0, "forward (blocks.2)", **dead), at(1, "forward (head)")])
    assert "Last seen: rank 0 in forward (blocks.2), rank 1 in forward (head)." in str(apart)
    assert "every rank must call the same modules" in str(apart)
    together = find_cause([at(0, "forward (head)", **dead), at(1, "forward (head)")])
    assert "every rank must call" not in str(together) and "last lines it printed" in str(together)
