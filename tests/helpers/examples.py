"""Runs a script of `examples`, and reads the numbers that it prints.

What is slow to import for the examples, the recipes and the pages is imported once, in the process that their
processes are forked from.
"""

import re
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
DIGITS = ("sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg")
LIBRARIES = (
    *DIGITS,
    "torch._dynamo",  # every optimizer imports it
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.schedulers.scheduling_ddpm",
    "sentence_transformers",
    "transformers.trainer",
    "accelerate",
    "sphinx.application",
    "myst_parser.sphinx_ext.main",
    "pytest",
)
# The ranks are forked from the launcher, which saves each of them its imports.
TORCHRUN = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node", "2", "--start-method", "fork", "--run-path", *sys.argv[1:]])
"""
TRAIN_ITEMS, TEST_ITEMS = 1536, 261  # of the digits of scikit-learn


def start(name, *arguments, ignored=(), imports=LIBRARIES):
    warnings = ["error", *(f"ignore::{category}" for category in ignored)]
    return warm.start(EXAMPLES / name, *arguments, warnings=warnings, imports=imports)


def run(name, *arguments, **options):
    """A script that has ended well; warnings are errors, but for some categories, and none was logged."""
    done = start(name, *arguments, **options).done(timeout=600)
    assert done.err == "", done.err
    return done


def torchrun(name, *arguments):
    """What two ranks of a script and their launcher have printed, when all have ended well."""
    env = {"TORCHCACHE_JOB": "", "OMP_NUM_THREADS": "1"}
    return warm.run(TORCHRUN, EXAMPLES / name, *arguments, env=env, imports=LIBRARIES)


def number(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1].replace(",", ""))


def size_of_plot(path):
    """The width and height of a picture, on which something is drawn."""
    with Image.open(path) as image:
        assert np.std(image.convert("RGB")) / 255 > 0.05
        return image.size


def code_and_output(name):
    """The script of a recipe's page, and what the page says that it prints."""
    text = (RECIPES / f"{name}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    return code, output
