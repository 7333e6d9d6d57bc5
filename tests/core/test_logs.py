import contextlib
import io
import logging
import os
import re
import subprocess
import sys

import pytest

from torchcache2 import set_logger_config

LOGGER = logging.getLogger("torchcache2")
VARIABLES = [f"TORCHCACHE_LOG_{name}" for name in ("LEVEL", "FMT", "DATEFMT", "FILE")]
DEFAULT_LINE = r"\[torchcache2\] - \d{4}-\d\d-\d\d \d\d:\d\d:\d\d - WARNING - careful\n"


@pytest.fixture(autouse=True)
def _own_configuration(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    set_logger_config()


def lines_of(config, levels=("debug", "info", "warning", "error")):
    stream = io.StringIO()
    set_logger_config(**config, stream=stream)
    for level in levels:
        getattr(LOGGER, level)(level)
    return stream.getvalue().splitlines()


def run(*script, **environ):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHCACHE_")}
    done = subprocess.run(
        [sys.executable, *script], env=kept | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


SPEAK = """
import logging
before = logging.root.level, list(logging.root.handlers), logging.root.disabled
import torchcache2
logger = logging.getLogger("torchcache2")
for level in ("debug", "info", "warning"):
    getattr(logger, level)("careful")
assert before == (logging.root.level, logging.root.handlers, logging.root.disabled)
assert [name for name in logging.root.manager.loggerDict if name.startswith("torchcache2")] == ["torchcache2"]
"""


def test_a_bare_import_logs_warnings_to_stderr_in_the_default_format():
    done = run("-c", SPEAK)
    assert re.fullmatch(DEFAULT_LINE, done.stderr)
    assert done.stdout == ""


def test_all_variables_of_the_environment_count_at_import(tmp_path):
    file = tmp_path / "cache.log"
    file.write_text("from an earlier run\n")
    done = run(
        "-c",
        SPEAK,
        TORCHCACHE_LOG_LEVEL="info",
        TORCHCACHE_LOG_FMT="%(asctime)s|%(levelname)s|%(message)s",
        TORCHCACHE_LOG_DATEFMT="year %Y",
        TORCHCACHE_LOG_FILE=str(file),
    )
    assert re.fullmatch(r"year \d{4}\|INFO\|careful\nyear \d{4}\|WARNING\|careful\n", done.stderr)
    assert file.read_text() == "from an earlier run\n" + done.stderr


LEVELS = [("DEBUG", "debug"), ("debug", "debug"), (" Info ", "info"), ("WARN", "warning")]
LEVELS += [("ERROR", "error"), ("10", "debug"), ("15", "info"), ("35", "error")]


@pytest.mark.parametrize(("level", "first"), LEVELS)
def test_levels(monkeypatch, level, first):
    names = ["debug", "info", "warning", "error"]
    expected = names[names.index(first) :]

    def said(lines):
        return [line.rpartition(" ")[2] for line in lines]

    monkeypatch.setenv("TORCHCACHE_LOG_LEVEL", level)
    assert said(lines_of({})) == expected
    monkeypatch.setenv("TORCHCACHE_LOG_LEVEL", "CRITICAL")
    assert said(lines_of({"level": level})) == expected
    number = logging.getLevelName(first.upper())
    assert said(lines_of({"level": number})) == expected


@pytest.mark.parametrize("level", ["loud", "-5", "1.5", "DEBUG INFO", "Level 10", "²", " "])
def test_a_bad_level_warns_and_is_replaced_by_the_default(monkeypatch, level):
    for config in ({"level": level}, {}):
        monkeypatch.setenv("TORCHCACHE_LOG_LEVEL", "DEBUG" if config else level)
        complaint, *lines = lines_of(config)
        assert f"no log level {level!r}" in complaint
        assert [line.rpartition(" ")[2] for line in lines] == ["warning", "error"]
        assert LOGGER.level == logging.WARNING


@pytest.mark.parametrize("fmt", ["no field", "%(message", "%(message)q", "%(message)s %(bogus)s"])
def test_a_bad_format_warns_and_is_replaced_by_the_default(capsys, fmt):
    complaint, line = lines_of({"fmt": fmt}, ["warning"])
    assert repr(fmt) in complaint
    assert line.startswith("[torchcache2] - ")
    assert line.endswith(" - WARNING - warning")
    assert capsys.readouterr().err == ""


def test_code_comes_before_the_environment(monkeypatch, tmp_path):
    for name, value in zip(
        VARIABLES, ("DEBUG", "environment %(message)s", "%y", str(tmp_path / "e")), strict=True
    ):
        monkeypatch.setenv(name, value)
    config = {"level": "ERROR", "fmt": "code %(asctime)s", "datefmt": "now", "filename": tmp_path / "c"}
    assert lines_of(config) == ["code now"]
    assert not (tmp_path / "e").exists()
    assert lines_of({"fmt": "code %(message)s", "level": "INFO"})[0] == "code info"


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    (line,) = lines_of({}, ["info", "warning"])
    assert line.startswith("[torchcache2] - ")


def test_a_file_that_cannot_be_opened_is_warned_about_and_left_out(tmp_path):
    missing = tmp_path / "nowhere" / "cache.log"
    complaint, line = lines_of({"filename": missing, "fmt": "%(message)s"}, ["warning"])
    assert complaint.startswith(f"cannot append the log to {str(missing)!r}: ")
    assert line == "warning"


def test_a_configuration_replaces_the_one_before(tmp_path, capsys):
    old = io.StringIO()
    set_logger_config(stream=old, filename=tmp_path / "old.log")
    file_handler = LOGGER.handlers[-1]
    set_logger_config(fmt="%(message)s")
    LOGGER.warning("once")
    assert len(LOGGER.handlers) == 1
    assert capsys.readouterr().err == "once\n"
    assert old.getvalue() == ""
    assert (tmp_path / "old.log").read_text() == ""
    assert file_handler.stream is None  # closed: an open file would be a leak


def test_lines_go_to_stderr_as_it_is_when_they_are_written():
    set_logger_config(fmt="%(message)s")
    for text in ("one", "two"):
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream):
            LOGGER.warning(text)
        assert stream.getvalue() == f"{text}\n"


def test_the_root_logger_hears_nothing():
    heard, handler = [], logging.Handler()
    handler.emit = heard.append
    logging.root.addHandler(handler)
    try:
        set_logger_config(level="DEBUG", stream=io.StringIO())
        LOGGER.error("careful")
        assert heard == []
    finally:
        logging.root.removeHandler(handler)
