"""What the tests of commands share: a model, its tokenizer, and commands that run."""

import json
import re

import printed_json
import pytest
from command_line import TINY

from bitnet_np.cli.main import main
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load
from bitnet_np.text.tokenizer import tokenizer_from


@pytest.fixture(scope="session")
def model():
    """The embedded model, which no test may change."""
    return load(TINY)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded model's tokenizer."""
    file = open_gguf(TINY)
    return tokenizer_from(file.metadata, file.path)


@pytest.fixture
def printed(capsys):
    """Runs a command that must end with `code`. Returns its standard output and error. With --json, its schema must accept the output."""

    def run_command(*arguments, code=0):
        assert main(list(map(str, arguments))) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        if "--json" in arguments:
            printed_json.check(arguments[0], out)
        return out, err

    return run_command


@pytest.fixture
def ended(capsys):
    """Runs words that the parser of arguments answers. Returns the exit code, standard output and error."""

    def run_words(*words):
        with pytest.raises(SystemExit) as stopped:
            main([*words])
        return stopped.value.code, *capsys.readouterr()

    return run_words


@pytest.fixture
def run(printed):
    """Runs a command that must end with `code`. Returns its standard output, as JSON where that was asked for."""

    def run_command(*arguments, code=0):
        out, _ = printed(*arguments, code=code)
        return json.loads(out, parse_constant=pytest.fail) if "--json" in arguments else out

    return run_command


@pytest.fixture
def refused(printed):
    """Runs a command that must end with 2 and print nothing but one line on standard error, which is returned."""

    def run_command(*arguments):
        out, err = printed(*arguments, code=2)
        assert out == ""
        assert re.fullmatch("bitnet-np: .+\n", err)
        return err

    return run_command
