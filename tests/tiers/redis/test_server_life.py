"""Our own server and the processes of its job, which end in every way."""

import os
import signal

import pytest

from tests.helpers import warm
from tests.helpers.ownserver import answers
from tests.helpers.storage import wait_until
from torchcache2.core.places import Server
from torchcache2.tiers.redis.server import let_go, own_servers
from torchcache2.tiers.shared.region import start_time

START = """
import os, pickle, signal, sys, time
from torchcache2.tiers.redis.server import hold
from torchcache2.tiers.redis.server import own_servers
from tests.helpers.ownserver import answers

servers = own_servers("50MB", "keep")
print("started", os.getpid(), flush=True)
"""
WAIT = START + "time.sleep(60)\n"


@pytest.fixture
def start(warmed, place):
    """Starts scripts of one job, or of each process by itself."""
    started = []

    def one(script, *args, job="", **options):
        env = {"TMPDIR": str(place.path), "TORCHCACHE_JOB": job}
        started.append(warm.start(script, *args, env=env, **options))
        return started[-1]

    yield one
    for process in started:
        process.send(signal.SIGKILL)
        process.poll(warm.DEADLINE)


def pids(place):
    return place.about["pid"], place.about["watcher"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.killpg(os.getpgid(0), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["end", "exit", "exception", "_exit", "SIGTERM", "SIGINT", "SIGKILL", "killpg"],
)
def test_nothing_is_left_when_the_trainer_ends(end, code, start, place):
    script = START + "print(*os.listdir(os.path.dirname(servers.guard)), flush=True)\nsys.stdin.readline()\n"
    if "killpg" in end:
        script = "import os\nos.setpgid(0, 0)\n" + script
    process = start(script + end)
    process.done(code)
    assert {"server", "held", "socket"} <= set(process.words)
    place.all_ended()


def test_another_server_is_started_when_one_has_ended(place):
    first = own_servers("50MB", "keep")
    both = pids(place)
    os.kill(both[0], signal.SIGKILL)
    second = own_servers("50MB", "keep")
    assert answers(second.servers[0]) and not any(map(start_time, both[:1]))
    wait_until(lambda: start_time(both[1]) == 0)
    assert answers(second.servers[0]) and first.guard == second.guard
    both = pids(place)
    let_go(second.guard)
    place.all_ended(*both)


@pytest.mark.slow
def test_the_server_ends_with_its_watcher(start, place):
    script = START + "while not os.path.exists('go'): time.sleep(0.002)\n"
    process = start(script, cwd=place.path).until("started")
    both = pids(place)
    os.kill(both[1], signal.SIGKILL)
    wait_until(lambda: not any(map(start_time, both)))
    (place.path / "go").touch()
    process.done()
    place.all_ended()  # the trainer has removed what the watcher could not


@pytest.mark.slow
def test_what_is_left_when_everything_is_killed_is_removed_by_the_next(start, place):
    process = start(WAIT).until("started")
    both = pids(place)
    for pid in (both[1], both[0], process.pid):
        os.kill(pid, signal.SIGKILL)
    process.done(-signal.SIGKILL)
    wait_until(lambda: not any(map(start_time, both)))
    (left,) = place.folders
    empty = place.path / f"{left.name[:-4]}0000"
    empty.mkdir(0o700)
    strange = place.path / f"{left.name[:-4]}ffff"
    strange.mkdir(0o755)
    servers = own_servers("50MB", "keep")
    assert place.folders == sorted([strange, place.path / os.path.basename(os.path.dirname(servers.guard))])
    let_go(servers.guard)
    strange.rmdir()
    place.all_ended()


@pytest.mark.slow
def test_signals_of_a_terminal_do_not_end_the_watcher(start, place):
    process = start(WAIT).until("started")
    both = pids(place)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(both[1], number)
    assert os.getsid(both[1]) != os.getsid(process.pid)
    process.send(signal.SIGINT)
    process.wait()
    place.all_ended(*both)


def test_the_trainer_has_no_child_and_no_output_is_kept_open(start, place):
    script = START + "try: os.wait()\nexcept ChildProcessError: print('childless')\ntime.sleep(60)"
    process = start(script, whole=True, warnings=["error"]).until("childless")
    watcher = place.about["watcher"]
    links = {os.readlink(f"/proc/{watcher}/fd/{number}") for number in range(3)}
    assert links == {os.devnull} and os.readlink(f"/proc/{watcher}/cwd") == "/"
    process.send(signal.SIGKILL)
    place.all_ended()


@pytest.mark.slow
def test_processes_of_a_job_share_until_the_last_has_ended(start, place):
    first = start(WAIT, job="one").until("started")
    both = pids(place)
    second = start(WAIT, job="one").until("started")
    assert pids(place) == both
    first.send(signal.SIGKILL)
    first.wait()
    server = Server.of(place.about["address"])
    assert answers(server) and len(place.folders) == 1
    third = start(WAIT, job="one").until("started")
    second.send(signal.SIGTERM)
    second.wait()
    assert answers(server) and pids(place) == both
    third.send(signal.SIGKILL)
    place.all_ended(*both)


def test_those_that_start_at_once_share(start, place):
    scripts = [
        start(START + "print(servers.servers[0].options)\ntime.sleep(60)", job="one") for _ in range(4)
    ]
    said = {process.until("password").out.splitlines()[1] for process in scripts}
    assert len(said) == 1 and len(place.folders) == 1
    for process in scripts:
        process.send(signal.SIGKILL)
    place.all_ended()


@pytest.mark.slow
def test_scripts_of_one_shell_do_not_share(start, place):
    scripts = [start(WAIT).until("started") for _ in range(2)]
    assert len(place.folders) == 2
    for process in scripts:
        process.send(signal.SIGKILL)
    place.all_ended()


LEFT = """
    hold(servers)
    print("holds", flush=True)
    while not os.path.exists("left"): time.sleep(0.002)
    assert answers(servers.servers[0])
    print("answers", flush=True)
    while not os.path.exists("go"): time.sleep(0.002)
"""


def check_that_it_outlives(process, child, place):
    """The server stays as long as a child that `holds`, and whose parent is left to end."""
    wait_until(lambda: "holds" in child.out)
    process.send(signal.SIGKILL)
    process.wait()
    (place.path / "left").touch()
    wait_until(lambda: "answers" in child.out)
    assert len(place.folders) == 1
    (place.path / "go").touch()
    place.all_ended()


def test_a_forked_child_keeps_the_server(start, place):
    process = start(f"{START}\nif os.fork() == 0:\n{LEFT}\n    os._exit(0)\ntime.sleep(60)", cwd=place.path)
    check_that_it_outlives(process, process, place)


def pickled(start, place):
    """A process, and one that reads its servers from a file: a child that is spawned imports torch first."""
    process = start(
        START + "pickle.dump(servers, open('part', 'wb'))\nos.rename('part', 'pickled')\ntime.sleep(60)",
        cwd=place.path,
    )
    wait_until((place.path / "pickled").exists)
    load = "servers = pickle.load(open('pickled', 'rb'))"
    script = START.replace('servers = own_servers("50MB", "keep")', load)
    return process, start(f"{script}if True:\n{LEFT}", cwd=place.path)


@pytest.mark.slow
def test_a_process_that_gets_the_servers_keeps_the_server(start, place):
    process, child = pickled(start, place)
    check_that_it_outlives(process, child, place)
