"""The fuzzer that coverage guides: every reader reads its sound files, findings are told and repeated. Where atheris is, it runs."""

import random
from importlib.util import find_spec

import fuzz_coverage
import pytest
from fuzzing import cases, readers


@pytest.fixture(scope="module")
def known():
    return readers.readers()


def test_sound_files_are_read_and_changed_ones_are_refused_by_name(known, tmp_path):
    draw, refused = random.Random(0), set()
    for name, reader in known.items():

        def outcome(data, reader=reader):
            folder = readers.written(tmp_path, reader, data)
            return cases.outcome(lambda: reader.read(folder), len(data))

        holds_no_values = name.startswith("dump-bitnet-rs")
        assert {outcome(seed) for seed in reader.seeds} == {"refused" if holds_no_values else "ran"}, name
        changed = {outcome(readers.mutated(draw.choice(reader.seeds), 1 << 16, draw)) for _ in range(20)}
        assert changed <= {"ran", "refused"}, name
        refused |= {name} if "refused" in changed else set()
    assert len(refused) > 0.8 * len(known)


def test_a_finding_is_repeated_from_its_file(known, tmp_path, monkeypatch, capsys):
    def fragile(folder):
        raise KeyError("planted")

    file = tmp_path / "x"
    file.write_bytes(known["prompts"].seeds[0])
    assert fuzz_coverage.main([str(file), "prompts", "--repeat"]) == 0
    monkeypatch.setattr(readers, "readers", lambda: {"prompts": readers.Reader("prompts", "t.jsonl", (), fragile)})
    assert fuzz_coverage.main([str(file), "prompts", "--repeat"]) == 1
    assert capsys.readouterr().out == "ran\nKeyError: 'planted'\n"


def test_a_reader_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        fuzz_coverage.main([str(tmp_path), "rust"])
    assert "unknown readers rust, expected some of gguf, " in capsys.readouterr().err


@pytest.mark.skipif(not find_spec("atheris"), reason="needs atheris")
def test_inputs_are_counted_and_the_corpus_grows(tmp_path, capsys):
    assert fuzz_coverage.main([str(tmp_path), "tokens-txt", "--seconds", "3"]) == 0
    assert capsys.readouterr().out.startswith("tokens-txt: ")
    assert len(list((tmp_path / "tokens-txt").iterdir())) > 1
