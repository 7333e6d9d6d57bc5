"""The tests here need the `bench` extra: they run only if their path is given."""

from pathlib import Path

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    given = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    if any(path.resolve().is_relative_to(HERE) for path in given):
        return None
    return True
