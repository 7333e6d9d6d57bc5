import re

from tests.helpers.examples import run


def test_shared_cache_decodes_each_image_once():
    done = run("shared_cache.py", "--items", 40, "--epochs", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "40 images, 40 of them with a slot; 2 workers" in done.stdout
    epochs = re.findall(r"^epoch (\d): (\d+) found, (\d+) decoded, [\d.]+ s$", done.stdout, re.MULTILINE)
    assert epochs == [("1", "0", "40"), ("2", "40", "0")]


def test_shared_cache_decodes_again_what_has_no_slot():
    done = run("shared_cache.py", "--items", 12, "--epochs", 2, "--gib", 4e-5, "--workers", 0)
    assert done.returncode == 0, done.stderr
    slots = int(4e-5 * 2**30 - 12) // 64**2
    assert f"12 images, {slots} of them with a slot" in done.stdout
    assert f"epoch 2: {slots} found, {12 - slots} decoded" in done.stdout
