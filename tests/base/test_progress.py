"""Progress: the library prints nothing, and tells a caller who asks."""

from dumps import FAULTS, MODEL, TOKENS, only, trace

from bitnet_np import check
from bitnet_np.base.progress import no_bars, silent
from bitnet_np.generation.nll import token_nll
from bitnet_np.judge.options import SEARCHING


def test_the_library_prints_nothing(capfd):
    silent(1, 2)
    no_bars("reading")(2, 2)
    token_nll(MODEL, TOKENS)
    dump, ids = FAULTS["SiLU for relu squared, every layer"].make(MODEL, TOKENS)
    check(MODEL, ids, trace(dump))
    assert capfd.readouterr() == ("", "")


def test_each_piece_of_work_has_a_bar_that_runs_to_its_end():
    """A dump of logits alone: known mistakes are tried on them, once in each type that the engine may compute in."""
    dump, ids = FAULTS["SiLU for relu squared, every layer"].make(MODEL, TOKENS)
    every = []

    def bars(label):
        every.append((label, bar := []))
        return lambda done, total: bar.append((done, total))

    check(MODEL, ids, only(dump, "result_output"), bars=bars)
    assert {label for label, bar in every if bar} - {SEARCHING} == {"trying known mistakes"}
    for label, bar in every:
        assert [done for done, _ in bar] == sorted(done for done, _ in bar)
        if bar and label != SEARCHING:  # which a cause ends at once
            assert bar[-1][0] == bar[-1][1] > 0
