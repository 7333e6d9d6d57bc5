"""Functions that run at once."""

import threading


def run_at_once(*functions, seconds=60):
    """Call each function in a thread of its own, all from one moment on; the first exception is raised."""
    barrier, errors = threading.Barrier(len(functions)), []

    def call(function):
        try:
            barrier.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
