"""The command line, called in this process."""

import contextlib
import io
import sys
from unittest import mock

import pytest

from torchcache2.__main__ import main


def run(*arguments, stdin="", code=0):
    """What a command writes as if from a script: to stdout, and to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(stdin)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main(list(map(str, arguments)))
    said = out.getvalue(), err.getvalue()
    assert (ended.value.code or 0) == code, said
    assert "Traceback" not in said[1]
    return said
