"""The command line, called in this process."""

import contextlib
import io
import json
import sys
from typing import NamedTuple
from unittest import mock

import pytest

from torchcache2.__main__ import main


class Done(NamedTuple):
    """What a command wrote to stdout, and to stderr."""

    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def cells(self):
        return [line.split("\t") for line in self.out.splitlines()]


def run(*arguments, stdin="", code=0):
    """Run a command as if from a script: nothing of it is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(stdin)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main(list(map(str, arguments)))
    done = Done(out.getvalue(), err.getvalue())
    assert (ended.value.code or 0) == code, done
    assert "\x1b" not in done.out + done.err and "Traceback" not in done.err
    return done
